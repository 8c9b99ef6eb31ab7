"""The bundled paged-attention engine and its OpenAI-compatible server."""

import os

# How long compute threads spin at the end of a parallel region before they sleep: see docs/design/0006. OpenMP reads this
# once, when torch is first imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
