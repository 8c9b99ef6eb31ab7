"""The bundled paged-attention engine and its OpenAI-compatible server."""

import os

# Compute threads that spin at every barrier stand still, a scheduler's time slice at a time, as soon as anything else
# wants a core: a 3-second prefill was seen to take 165. OpenMP reads this once, when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
