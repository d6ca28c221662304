"""libllama, llama.cpp's C library, through ctypes: what we use of llama.h and ggml.h, declared here.

`load()` opens the library of `library_folder()` once per process; nothing else opens it. The declarations are those of
the pinned releases, prebuilt and built here. A struct of another layout would corrupt memory silently, so the engine's
self-test compares sizes and defaults in a child process before a library is used.

A call that releases the GIL waits up to a switch interval to get it back. That is worth it only for long calls: decode,
loading, state copies. Sampling, logits and memory operations keep it (`short`).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from contextlib import suppress
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.library.llama_cpp_package import library_folder
from modelyard.plugins import MissingLibrary

# --- the structs of llama.h -------------------------------------------------------------------------------------------

# Handles (models, contexts, samplers …) are `c_void_p`. C keeps the address of a callback: keep the object, too.
llama_token = c_int32
llama_progress_callback = CFUNCTYPE(c_bool, c_float, c_void_p)
llama_log_callback = CFUNCTYPE(None, c_int, c_char_p, c_void_p)


class llama_model_tensor_buft_override(Structure):  # noqa: N801
    _fields_ = (("pattern", c_char_p), ("buft", c_void_p))


class llama_model_params(Structure):  # noqa: N801 the names of llama.h
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", POINTER(c_float)),
        ("progress_callback", llama_progress_callback),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class llama_context_params(Structure):  # noqa: N801
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


def _with_field(struct: type[Structure], after: str, *field: Any) -> type[Structure]:
    """The struct as a later release declares it: with one more field."""
    fields = list(struct._fields_)
    at = next(number for number, (name, *_) in enumerate(fields) if name == after) + 1
    return type(struct.__name__, (Structure,), {"_fields_": (*fields[:at], field, *fields[at:])})


# `llama_context_params` by release. v1.0 drops `defrag_thold`, and padding takes its place.
CONTEXT_LAYOUTS: dict[str, type[Structure]] = {
    "v0.4": llama_context_params,
    "v0.7": _with_field(llama_context_params, "type_v", "moe_cache_size", c_size_t),
}
# What the C code fills in. With another layout the values would be in other fields: the layout that has them is the
# library's (`context_layout`), and the self-test compares all of them and the sizes.
CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    **dict.fromkeys(("n_rs_seq", "n_outputs_max", "ctx_type", "yarn_orig_ctx", "n_samplers"), 0),
    **dict.fromkeys(("n_outputs_max_per_seq", "type_k", "type_v"), 1),
    **dict.fromkeys(("n_threads", "n_threads_batch"), 4),
    **dict.fromkeys(("rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type"), -1),
    **dict.fromkeys(("rope_freq_base", "rope_freq_scale"), 0.0),
    **dict.fromkeys(("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"), -1.0),
    **dict.fromkeys(("cb_eval", "cb_eval_user_data", "abort_callback", "abort_callback_data"), None),
    **dict.fromkeys(("samplers", "ctx_other"), None),
    **dict.fromkeys(("embeddings", "kv_unified"), False),
    **dict.fromkeys(("offload_kqv", "no_perf", "op_offload", "swa_full"), True),
}
MODEL_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("devices", "tensor_buft_overrides", "progress_callback_user_data", "kv_overrides"), None),
    **dict.fromkeys(("n_gpu_layers", "load_mode"), -1),
    **dict.fromkeys(("split_mode", "lazy_mode"), 1),
    "main_gpu": 0,
    **dict.fromkeys(("vocab_only", "check_tensors", "no_host", "no_alloc", "load_mtp"), False),
    "use_extra_bufts": True,
}


class llama_batch(Structure):  # noqa: N801
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class llama_token_data(Structure):  # noqa: N801
    _fields_ = (("id", c_int32), ("logit", c_float), ("p", c_float))


class llama_token_data_array(Structure):  # noqa: N801
    _fields_ = (("data", POINTER(llama_token_data)), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool))


class llama_logit_bias(Structure):  # noqa: N801
    _fields_ = (("token", c_int32), ("bias", c_float))


class llama_sampler_chain_params(Structure):  # noqa: N801
    _fields_ = (("no_perf", c_bool),)


class llama_sampler_data(Structure):  # noqa: N801
    _fields_ = (("logits", c_void_p), ("probs", c_void_p), ("sampled", c_void_p), ("candidates", c_void_p))


llama_sampler_backend_init = CFUNCTYPE(c_bool, c_void_p, c_void_p, c_uint32)
llama_sampler_backend_apply = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, POINTER(llama_sampler_data))


class llama_sampler_i(Structure):  # noqa: N801
    _fields_ = (
        ("name", c_void_p),
        ("accept", c_void_p),
        ("apply", c_void_p),
        ("reset", c_void_p),
        ("clone", c_void_p),
        ("free", c_void_p),
        ("backend_init", llama_sampler_backend_init),
        ("backend_accept", c_void_p),
        ("backend_apply", llama_sampler_backend_apply),
        ("backend_set_input", c_void_p),
        ("backend_reset", c_void_p),
        ("copy_state", c_void_p),
    )


class ggml_threadpool_params(Structure):  # noqa: N801
    _fields_ = (
        ("cpumask", c_bool * 512),  # GGML_MAX_N_THREADS
        ("n_threads", c_int),
        ("prio", c_int),
        ("poll", c_uint32),
        ("strict_cpu", c_bool),
        ("paused", c_bool),
    )


# --- the functions ----------------------------------------------------------------------------------------------------

_Declaration = tuple[Any, list[Any]]  # result, arguments

_FUNCTIONS: dict[str, _Declaration] = {
    # library and log
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [llama_log_callback, c_void_p]),
    "llama_supports_gpu_offload": (c_bool, []),
    "llama_max_devices": (c_size_t, []),
    "llama_numa_init": (None, [c_int]),
    # models
    "llama_model_default_params": (llama_model_params, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, llama_model_params]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_model_chat_template": (c_char_p, [c_void_p, c_char_p]),
    "llama_model_meta_val_str": (c_int32, [c_void_p, c_char_p, c_char_p, c_size_t]),
    "llama_model_n_embd": (c_int32, [c_void_p]),
    "llama_model_n_layer": (c_int32, [c_void_p]),
    "llama_model_n_embd_inp": (c_int32, [c_void_p]),
    "llama_model_n_embd_out": (c_int32, [c_void_p]),
    "llama_model_n_cls_out": (c_uint32, [c_void_p]),
    "llama_model_n_swa": (c_int32, [c_void_p]),
    "llama_model_has_encoder": (c_bool, [c_void_p]),
    "llama_model_is_recurrent": (c_bool, [c_void_p]),
    "llama_model_is_hybrid": (c_bool, [c_void_p]),
    "llama_adapter_lora_init": (c_void_p, [c_void_p, c_char_p]),
    "llama_adapter_lora_free": (None, [c_void_p]),
    # vocabularies
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_vocab_type": (c_int, [c_void_p]),
    "llama_vocab_get_text": (c_char_p, [c_void_p, c_int32]),
    "llama_vocab_get_attr": (c_int, [c_void_p, c_int32]),
    "llama_vocab_is_eog": (c_bool, [c_void_p, c_int32]),
    "llama_vocab_bos": (c_int32, [c_void_p]),
    "llama_vocab_eos": (c_int32, [c_void_p]),
    "llama_vocab_sep": (c_int32, [c_void_p]),
    "llama_vocab_get_add_bos": (c_bool, [c_void_p]),
    "llama_vocab_get_add_eos": (c_bool, [c_void_p]),
    "llama_vocab_get_add_sep": (c_bool, [c_void_p]),
    "llama_vocab_fim_pre": (c_int32, [c_void_p]),
    "llama_vocab_fim_suf": (c_int32, [c_void_p]),
    "llama_vocab_fim_mid": (c_int32, [c_void_p]),
    "llama_vocab_fim_rep": (c_int32, [c_void_p]),
    "llama_vocab_fim_sep": (c_int32, [c_void_p]),
    "llama_tokenize": (c_int32, [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_token_to_piece": (c_int32, [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool]),
    # contexts
    "llama_free": (None, [c_void_p]),
    "llama_get_model": (c_void_p, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_n_rs_seq": (c_uint32, [c_void_p]),
    "llama_set_adapter_cvec": (c_int32, [c_void_p, POINTER(c_float), c_size_t, c_int32, c_int32, c_int32]),
    "llama_set_adapters_lora": (c_int32, [c_void_p, POINTER(c_void_p), c_size_t, POINTER(c_float)]),
    "llama_attach_threadpool": (None, [c_void_p, c_void_p, c_void_p]),
    "llama_batch_init": (llama_batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [llama_batch]),
    "llama_batch_get_one": (llama_batch, [POINTER(c_int32), c_int32]),
    "llama_encode": (c_int32, [c_void_p, llama_batch]),
    "llama_decode": (c_int32, [c_void_p, llama_batch]),
    "llama_set_causal_attn": (None, [c_void_p, c_bool]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits": (POINTER(c_float), [c_void_p]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_get_embeddings": (POINTER(c_float), [c_void_p]),
    "llama_get_embeddings_seq": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_memory_can_shift": (c_bool, [c_void_p]),
    "llama_state_seq_get_size_ext": (c_size_t, [c_void_p, c_int32, c_uint32]),
    "llama_state_seq_get_data_ext": (c_size_t, [c_void_p, POINTER(c_uint8), c_size_t, c_int32, c_uint32]),
    "llama_state_seq_set_data_ext": (c_size_t, [c_void_p, POINTER(c_uint8), c_size_t, c_int32, c_uint32]),
    # samplers
    "llama_sampler_chain_default_params": (llama_sampler_chain_params, []),
    "llama_sampler_chain_init": (c_void_p, [llama_sampler_chain_params]),
    # ggml: found in the libraries that libllama is linked to
    "ggml_backend_reg_count": (c_size_t, []),
    "ggml_backend_reg_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_reg_get_proc_address": (c_void_p, [c_void_p, c_char_p]),
    "ggml_backend_load_all_from_path": (None, [c_char_p]),
    "ggml_backend_cpu_buffer_type": (c_void_p, []),
    "ggml_backend_dev_by_name": (c_void_p, [c_char_p]),
    "ggml_backend_dev_buffer_type": (c_void_p, [c_void_p]),
    "ggml_backend_dev_count": (c_size_t, []),
    "ggml_backend_dev_get": (c_void_p, [c_size_t]),
    "ggml_backend_dev_name": (c_char_p, [c_void_p]),
    "ggml_backend_dev_description": (c_char_p, [c_void_p]),
    "ggml_backend_dev_type": (c_int, [c_void_p]),
    "ggml_backend_dev_memory": (None, [c_void_p, POINTER(c_size_t), POINTER(c_size_t)]),
    "ggml_threadpool_params_init": (None, [POINTER(ggml_threadpool_params), c_int]),
}

_SHORT: dict[str, _Declaration] = {
    "llama_get_logits": (c_void_p, [c_void_p]),
    "llama_get_logits_ith": (c_void_p, [c_void_p, c_int32]),
    "llama_get_embeddings_seq": (POINTER(c_float), [c_void_p, c_int32]),
    "llama_get_sampled_token_ith": (c_int32, [c_void_p, c_int32]),
    "llama_set_n_threads": (None, [c_void_p, c_int32, c_int32]),
    "llama_set_sampler": (c_bool, [c_void_p, c_int32, c_void_p]),
    "llama_sampler_init": (c_void_p, [POINTER(llama_sampler_i), c_void_p]),
    "llama_sampler_sample": (c_int32, [c_void_p, c_void_p, c_int32]),
    "llama_sampler_apply": (None, [c_void_p, c_void_p]),
    "llama_sampler_accept": (None, [c_void_p, c_int32]),
    "llama_sampler_clone": (c_void_p, [c_void_p]),
    "llama_sampler_free": (None, [c_void_p]),
    "llama_sampler_chain_add": (None, [c_void_p, c_void_p]),
    "llama_sampler_init_greedy": (c_void_p, []),
    "llama_sampler_init_dist": (c_void_p, [c_uint32]),
    "llama_sampler_init_top_k": (c_void_p, [c_int32]),
    "llama_sampler_init_top_p": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_min_p": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_typical": (c_void_p, [c_float, c_size_t]),
    "llama_sampler_init_temp": (c_void_p, [c_float]),
    "llama_sampler_init_temp_ext": (c_void_p, [c_float, c_float, c_float]),
    "llama_sampler_init_top_n_sigma": (c_void_p, [c_float]),
    "llama_sampler_init_adaptive_p": (c_void_p, [c_float, c_float, c_uint32]),
    "llama_sampler_init_xtc": (c_void_p, [c_float, c_float, c_size_t, c_uint32]),
    "llama_sampler_init_mirostat": (c_void_p, [c_int32, c_uint32, c_float, c_float, c_int32]),
    "llama_sampler_init_mirostat_v2": (c_void_p, [c_uint32, c_float, c_float]),
    "llama_sampler_init_penalties": (c_void_p, [c_int32, c_int32, c_float, c_float, c_float]),
    "llama_sampler_init_dry": (c_void_p, [c_void_p, c_float, c_float, c_int32, c_int32, POINTER(c_char_p), c_size_t]),
    "llama_sampler_init_logit_bias": (c_void_p, [c_int32, c_int32, c_void_p]),
    "llama_memory_seq_rm": (c_bool, [c_void_p, c_int32, c_int32, c_int32]),
    "llama_memory_seq_cp": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_add": (None, [c_void_p, c_int32, c_int32, c_int32, c_int32]),
    "llama_memory_seq_pos_min": (c_int32, [c_void_p, c_int32]),
    "llama_memory_seq_pos_max": (c_int32, [c_void_p, c_int32]),
}


# Of llama.cpp's staging header, which a release may change: looked up when the library is loaded, first as plain C,
# then as C++ with the types of the arguments behind the name. A library without them lacks what needs them.
_CONTEXT = "P13llama_context"
_STAGING: dict[str, tuple[str, _Declaration]] = {
    "llama_model_n_layer_nextn": ("PK11llama_model", (c_int32, [c_void_p])),
    "llama_set_embeddings_nextn": (_CONTEXT + "bb", (None, [c_void_p, c_bool, c_bool])),
    "llama_get_embeddings_nextn": (_CONTEXT, (c_void_p, [c_void_p])),
    "llama_get_embeddings_nextn_ith": (_CONTEXT + "i", (c_void_p, [c_void_p, c_int32])),
    "llama_set_nextn_layer_offset": (_CONTEXT + "i", (None, [c_void_p, c_int32])),
    "llama_set_embeddings_layer_inp": (_CONTEXT + "jb", (None, [c_void_p, c_uint32, c_bool])),
    "llama_get_embeddings_layer_inp": (_CONTEXT + "j", (c_void_p, [c_void_p, c_uint32])),
    "llama_model_target_layer_ids": ("PK11llama_model", (c_void_p, [c_void_p])),
    "llama_model_target_layer_ids_n": ("PK11llama_model", (c_uint32, [c_void_p])),
}
# What each kind of drafts needs.
FEATURES: dict[str, tuple[str, ...]] = {
    "mtp": tuple(_STAGING)[:5],
    "eagle3": tuple(_STAGING)[1:4] + tuple(_STAGING)[5:],
}


class ShortCalls:
    """Calls that keep the GIL, by their names in llama.h without `llama_`."""

    def __init__(self, path: Path) -> None:
        library = ctypes.PyDLL(str(path))
        for name, declaration in _SHORT.items():
            setattr(self, name.removeprefix("llama_"), declared(library, name, declaration))
        for name, function in staged(library).items():
            setattr(self, name.removeprefix("llama_"), function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not one of the short calls")


class WaitingCalls:
    """Short calls that may take long. `llama_get_logits` waits for the GPU; `llama_sampler_init_dry` compares each
    sequence breaker with the whole vocabulary, 2 to 25 ms for each."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.get_logits: Any = declared(library, "llama_get_logits", _SHORT["llama_get_logits"])
        self.sampler_init_dry: Any = declared(library, "llama_sampler_init_dry", _SHORT["llama_sampler_init_dry"])


_GPU, _INTEGRATED_GPU = 1, 2  # ggml_backend_dev_type


class GpuDevice(Struct, frozen=True):
    """A GPU that the library uses: its name in llama.cpp's log, what it is, and bytes."""

    name: str
    description: str
    free: int
    total: int


class LibLlama:
    """The loaded library: its functions by their names in llama.h and ggml.h; these calls release the GIL.

    Short calls are here, too, for those who have no step loop.
    """

    llama_batch = llama_batch
    llama_log_callback = llama_log_callback
    llama_logit_bias = llama_logit_bias
    llama_model_params = llama_model_params
    llama_model_tensor_buft_override = llama_model_tensor_buft_override
    llama_progress_callback = llama_progress_callback
    llama_token = llama_token
    llama_token_data = llama_token_data
    llama_token_data_array = llama_token_data_array

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, find_library(folder)
        try:
            self.raw = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise MissingLibrary(f"{self.path} cannot be loaded: {error}") from error
        for name, declaration in (_SHORT | _FUNCTIONS).items():
            setattr(self, name, declared(self.raw, name, declaration))
        self.llama_context_params = context_layout(self.raw, self.path)
        for name, declaration in (
            ("llama_context_default_params", (self.llama_context_params, [])),
            ("llama_init_from_model", (c_void_p, [c_void_p, self.llama_context_params])),
        ):
            setattr(self, name, declared(self.raw, name, declaration))
        self.version = library_version(self.raw)
        self.missing = frozenset(_STAGING) - frozenset(staged(self.raw))
        self.identity = f"{self.path.name} {self.path.stat().st_size}"  # states of another build must not be restored
        self.short, self.waiting = ShortCalls(self.path), WaitingCalls(self.path)
        self.llama_log_set(_silent, None)
        if self.ggml_backend_reg_count() == 0:  # the backends are plug-ins: the best for this CPU, and those of GPUs
            self.ggml_backend_load_all_from_path(str(folder).encode())

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not declared in modelyard/libllama.py")

    def lacks(self, feature: str) -> list[str]:
        """The functions that a feature needs and this library does not export."""
        return [name for name in FEATURES[feature] if name in self.missing]

    def gpu_devices(self) -> list[GpuDevice]:
        """The GPUs that models are offloaded to; integrated ones only if there are no others. Starts their driver."""
        handles = [self.ggml_backend_dev_get(index) for index in range(self.ggml_backend_dev_count())]
        kinds = [self.ggml_backend_dev_type(handle) for handle in handles]
        wanted = _GPU if _GPU in kinds else _INTEGRATED_GPU
        return [self._gpu_device(handle) for handle, kind in zip(handles, kinds, strict=True) if kind == wanted]

    def _gpu_device(self, handle: Any) -> GpuDevice:
        free, total = c_size_t(), c_size_t()
        self.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        name, description = self.ggml_backend_dev_name(handle), self.ggml_backend_dev_description(handle)
        return GpuDevice(name.decode(), description.decode("utf-8", "replace"), free.value, total.value)

    def cpu_function(self, name: str, result: Any, *arguments: Any) -> Any | None:
        """A function of the CPU backend, wherever that is: in a plug-in or linked. None if it has no such function."""
        backend = self.ggml_backend_reg_by_name(b"CPU")
        address = self.ggml_backend_reg_get_proc_address(backend, name.encode()) if backend else None
        return CFUNCTYPE(result, *arguments)(address) if address else None


def declared(library: ctypes.CDLL, name: str, declaration: _Declaration) -> Any:
    """A function of the library with its declaration."""
    try:
        function = getattr(library, name)
    except AttributeError:
        raise MissingLibrary(
            f"{library._name} is a release of llama.cpp that this program does not know: it has no function {name}"
        ) from None
    function.restype, function.argtypes = declaration
    return function


class _AnyParams(Structure):
    """Room for a struct of any release."""

    _fields_ = (("raw", c_uint8 * 512),)


def context_layout(library: ctypes.CDLL, path: Path) -> type[Structure]:
    """The declaration of `llama_context_params` that has this library's defaults in their places."""
    data = bytes(declared(library, "llama_context_default_params", (_AnyParams, []))().raw)
    for layout in CONTEXT_LAYOUTS.values():
        found = layout.from_buffer_copy(data)
        if all(getattr(found, name) == value for name, value in CONTEXT_DEFAULTS.items()):
            return layout
    raise MissingLibrary(f"{path} is a release of llama.cpp that this program does not know: llama_context_params")


def library_version(library: ctypes.CDLL) -> str:
    try:
        found = declared(library, "llama_version", (c_char_p, []))()
    except MissingLibrary:
        return "an unknown version"
    return (found or b"").decode("utf-8", "replace")


def staged(library: ctypes.CDLL) -> dict[str, Any]:
    """The functions of the staging header that the library's symbol table has, under either name."""
    found = {}
    for name, (types, (result, arguments)) in _STAGING.items():
        for symbol in (name, f"_Z{len(name)}{name}{types}"):
            with suppress(AttributeError):
                function = getattr(library, symbol)
                function.restype, function.argtypes = result, arguments
                found[name] = function
                break
    return found


_silent = llama_log_callback(lambda _level, _text, _data: None)


# --- loading ----------------------------------------------------------------------------------------------------------

_FILE = re.compile(r"(?:lib)?llama(?:\.[\w.]+)?\.(?:so|dylib|dll)(?:\.[\d.]+)?")
VULKAN_MANIFEST = "vulkan_driver.json"  # beside the library: a driver that Vulkan's loader does not find by itself
_lock = threading.Lock()
_loaded: LibLlama | None = None


def find_library(folder: Path) -> Path:
    """libllama's file; its name has the release and the kind of GPU in some packages."""
    names = sorted((file.name for file in folder.glob("*llama*") if _FILE.fullmatch(file.name)), key=len)
    if not names:
        raise MissingLibrary(f"There is no llama.cpp library in {folder}: `modelyard setup` fetches one.")
    return folder / names[0]


def load() -> LibLlama:
    """The library of this process. It stays loaded until the process ends, whatever is chosen meanwhile."""
    global _loaded  # noqa: PLW0603
    with _lock:
        if _loaded is None:
            folder = library_folder()
            os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # a failed assertion prints itself, and no debugger
            if sys.platform == "win32":
                os.add_dll_directory(str(folder))
            if (manifest := folder / VULKAN_MANIFEST).is_file():
                os.environ.setdefault("VK_ADD_DRIVER_FILES", str(manifest))
            _loaded = LibLlama(folder)
        return _loaded
