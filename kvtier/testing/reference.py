"""The ``transformers`` model that the engine is compared with, in tests and in the benchmark."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier.engine.architecture import ModelConfig


def reference_model(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], rope: Mapping[str, object] | None = None
) -> LlamaForCausalLM:
    """``LlamaForCausalLM`` with these weights (shared, not copied), float32 with SDPA, in evaluation mode.

    ``rope`` overrides parameters of the rope, as ``open_checkpoint`` has them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_eps,
            max_position_embeddings=config.max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta, **(rope or {})},
            tie_word_embeddings=config.tie_embeddings,
        )
        with torch.device("meta"):
            model: LlamaForCausalLM = LlamaForCausalLM._from_config(theirs, attn_implementation="sdpa")  # type: ignore[no-untyped-call]
        tied = {"lm_head.weight": tensors["model.embed_tokens.weight"]} if config.tie_embeddings else {}
        model.load_state_dict({**tensors, **tied}, assign=True)
        model.model.rotary_emb = type(model.model.rotary_emb)(theirs)
    model.train(mode=False)
    return model
