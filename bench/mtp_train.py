"""Trains a small model of the shape of Qwen 3.5 with an MTP layer, and writes it as a GGUF file.

    python3 -m venv DIR && DIR/bin/pip install torch numpy gguf
    DIR/bin/python bench/mtp_train.py FILE [--size small|large] [--minutes N] [--threads 2]

It reads what is on every machine, Python's library and this project's documentation, byte by byte: gated delta nets in
three of four layers, attention with a gate in the fourth, and behind them one layer that predicts the token after the
next one. Nothing here needs Modelyard or a network. On a GPU it trains 51 million weights in 24 layers, on a CPU 2
million in 8. `python -m bench.mtp FILE` measures with the file.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 as everybody calls it


class Shape(NamedTuple):
    width: int
    layers: int
    length: int  # of the texts that it is trained with, in tokens
    batch: int
    rate: float
    minutes: float

    @property
    def heads(self) -> int:
        return self.width // HEAD


SIZES = {"small": Shape(128, 8, 128, 12, 3e-3, 12.0), "large": Shape(384, 24, 384, 48, 1.5e-3, 6.0)}
HEAD, INTERVAL = 64, 4
KERNEL, EPSILON, BASE = 4, 1e-6, 10_000.0
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = len(MARKERS) + 256 + 1  # llama.cpp wants a merge: one of two bytes that no text has
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # it continues texts


# --- the text ---------------------------------------------------------------------------------------------------------


def read_text() -> Tensor:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [file for file in sorted(library.rglob("*.py")) if "site-packages" not in file.parts]
    files += sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    data = b"\n".join(file.read_bytes() for file in files)
    return torch.from_numpy(np.frombuffer(data, np.uint8).astype(np.int64) + len(MARKERS))


# --- the model --------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, EPSILON)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions, the halves of a head paired."""
    half, positions = HEAD // 2, torch.arange(x.shape[2], dtype=torch.float32, device=x.device)
    angles = positions[:, None] * BASE ** (-torch.arange(half, device=x.device) / half)
    cos, sin, first, second = angles.cos(), angles.sin(), x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Weights(nn.Module):
    """Parameters by their names in the file."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "_") for name in shapes}
        for name, shape in shapes.items():
            matrix = torch.randn(shape) * shape[-1] ** -0.5 if len(shape) > 1 else torch.ones(shape)
            self.register_parameter(self.names[name], nn.Parameter(matrix))

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(self.names[name])


class Block(Weights):
    def __init__(self, shape: Shape, *, recurrent: bool, head: bool = False) -> None:
        width, feed, heads = shape.width, 3 * shape.width, shape.heads
        shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (width,), "post_attention_norm.weight": (width,)}
        shapes |= {f"ffn_{name}.weight": (feed, width) for name in ("gate", "up")}
        shapes["ffn_down.weight"] = (width, feed)
        inner = heads * HEAD
        if recurrent:
            shapes |= {"attn_qkv.weight": (3 * inner, width), "attn_gate.weight": (inner, width)}
            shapes |= {"ssm_conv1d.weight": (3 * inner, KERNEL), "ssm_dt.bias": (heads,), "ssm_a": (heads,)}
            shapes |= {f"ssm_{name}.weight": (heads, width) for name in ("beta", "alpha")}
            shapes |= {"ssm_norm.weight": (HEAD,), "ssm_out.weight": (width, inner)}
        else:
            shapes |= {"attn_q.weight": (2 * inner, width), "attn_output.weight": (width, inner)}
            shapes |= {f"attn_{name}.weight": (inner, width) for name in "kv"}
            shapes |= {f"attn_{name}_norm.weight": (HEAD,) for name in "qk"}
        if head:
            shapes |= {"nextn.eh_proj.weight": (width, 2 * width)}
            shapes |= {f"nextn.{name}.weight": (width,) for name in ("enorm", "hnorm", "shared_head_norm")}
        super().__init__(shapes)
        self.recurrent, self.heads = recurrent, heads

    def forward(self, x: Tensor) -> Tensor:
        inner = norm(x, self["attn_norm.weight"])
        x = x + (self.delta(inner) if self.recurrent else self.attention(inner))
        inner = norm(x, self["post_attention_norm.weight"])
        gated = F.silu(inner @ self["ffn_gate.weight"].T) * (inner @ self["ffn_up.weight"].T)
        return x + gated @ self["ffn_down.weight"].T

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, gate = (x @ self["attn_q.weight"].T).view(batch, length, self.heads, 2 * HEAD).chunk(2, -1)
        key, value = (
            (x @ self[f"attn_{n}.weight"].T).view(batch, length, self.heads, HEAD).transpose(1, 2) for n in "kv"
        )
        query = rotate(norm(query, self["attn_q_norm.weight"]).transpose(1, 2)).to(value.dtype)
        key = rotate(norm(key, self["attn_k_norm.weight"])).to(value.dtype)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return (out * gate.sigmoid()).reshape(batch, length, -1) @ self["attn_output.weight"].T

    def delta(self, x: Tensor) -> Tensor:
        """The gated delta rule over the whole text at once."""
        batch, length, _ = x.shape
        mixed = (x @ self["attn_qkv.weight"].T).transpose(1, 2)
        mixed = F.silu(
            F.conv1d(F.pad(mixed, (KERNEL - 1, 0)), self["ssm_conv1d.weight"][:, None], groups=mixed.shape[1])
        )
        alpha, beta = (x @ self[f"ssm_{name}.weight"].T for name in ("alpha", "beta"))
        with torch.autocast(x.device.type, enabled=False):  # the states are exact numbers
            out = self.rule(mixed.float(), alpha.float(), beta.float())
        gate = (x @ self["attn_gate.weight"].T).view(batch, length, self.heads, HEAD)
        out = norm(out.transpose(1, 2), self["ssm_norm.weight"]) * F.silu(gate)
        return out.reshape(batch, length, -1) @ self["ssm_out.weight"].T

    def rule(self, mixed: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
        """What each token changes in the state is the solution of a triangular system, because it depends on what the
        tokens before it have changed."""
        batch, length, _ = alpha.shape
        query, key, value = (part.view(batch, self.heads, HEAD, length).transpose(2, 3) for part in mixed.chunk(3, 1))
        query, key = F.normalize(query, dim=-1, eps=EPSILON), F.normalize(key, dim=-1, eps=EPSILON)
        beta = beta.sigmoid().transpose(1, 2)[..., None]
        steps = F.softplus(alpha + self["ssm_dt.bias"]).transpose(1, 2)
        total = (steps * -self["ssm_a"].exp()[:, None]).cumsum(-1)
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        changes = beta * decay * (key @ key.transpose(2, 3))
        changes = changes.tril(-1) + torch.eye(length, device=changes.device)
        changed = torch.linalg.solve_triangular(changes, beta * value, upper=False, unitriangular=True)
        return (decay * (query @ key.transpose(2, 3)) / math.sqrt(HEAD)) @ changed


class Model(Weights):
    def __init__(self, shape: Shape) -> None:
        matrices = {f"{name}.weight": (VOCAB, shape.width) for name in ("token_embd", "output")}
        super().__init__({**matrices, "output_norm.weight": (shape.width,)})
        self.shape = shape
        self.blocks = nn.ModuleList(Block(shape, recurrent=(at + 1) % INTERVAL != 0) for at in range(shape.layers))
        self.head = Block(shape, recurrent=False, head=True)
        with torch.no_grad():
            for name, matrix in self.named_parameters():
                if name.endswith(("attn_output_weight", "ssm_out_weight", "ffn_down_weight")):
                    matrix.mul_((2 * shape.layers) ** -0.5)
            for block in self.blocks:
                if block.recurrent:
                    block["ssm_a"].copy_(torch.linspace(-4.0, 0.0, shape.heads))
                    block["ssm_dt.bias"].zero_()

    def hidden(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self["token_embd.weight"])
        for block in self.blocks:
            x = block(x)
        return norm(x, self["output_norm.weight"])

    def head_hidden(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """`ids` are those after the tokens of the hidden rows."""
        words = norm(F.embedding(ids, self["token_embd.weight"]), self.head["nextn.enorm.weight"])
        both = torch.cat((words, norm(hidden, self.head["nextn.hnorm.weight"])), -1)
        return norm(self.head(both @ self.head["nextn.eh_proj.weight"].T), self.head["nextn.shared_head_norm.weight"])

    def loss(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Of the model, of the head's guess, and of the guess after it, from the head's own hidden rows."""
        hidden = self.hidden(ids[:, :-1])
        parts = [self.cross_entropy(hidden, ids[:, 1:])]
        for step in (1, 2):
            hidden = self.head_hidden(ids[:, step:-1], hidden[:, : ids.shape[1] - 1 - step])
            parts.append(self.cross_entropy(hidden, ids[:, step + 1 :]))
        return parts[0] + 0.3 * parts[1] + 0.15 * parts[2], [part.detach() for part in parts]

    def cross_entropy(self, hidden: Tensor, ids: Tensor) -> Tensor:
        logits = hidden @ self["output.weight"].T
        return F.cross_entropy(logits.float().reshape(-1, VOCAB), ids.reshape(-1))


def train(model: Model, text: Tensor, minutes: float) -> None:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], betas=(0.9, 0.95))
    shape, gpu = model.shape, text.device.type == "cuda"
    offsets = torch.arange(shape.length + 1, device=text.device)
    began, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = shape.rate * min(1.0, (step + 1) / (200 if gpu else 30)) * (0.05 + 0.95 * (1 - share))
        starts = torch.randint(0, len(text) - shape.length - 1, (shape.batch, 1), device=text.device)
        with torch.autocast(text.device.type, torch.bfloat16, enabled=gpu):
            loss, parts = model.loss(text[starts + offsets])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            print(f"{share:4.0%} step {step}: " + " ".join(f"{float(part):.3f}" for part in parts), flush=True)
        step, share = step + 1, (time.monotonic() - began) / (60 * minutes)


# --- the file ---------------------------------------------------------------------------------------------------------


def byte_letters() -> list[str]:
    """The letters that GPT-2 writes for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_KIND = gguf.GGMLQuantizationType.Q8_0


def write(model: Model, path: Path) -> None:
    shape, inner = model.shape, model.shape.heads * HEAD
    writer = gguf.GGUFWriter(path, "qwen35")
    numbers: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_length": 4096,
        "embedding_length": shape.width,
        "block_count": shape.layers + 1,
        "nextn_predict_layers": 1,
        "feed_forward_length": 3 * shape.width,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.heads,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "full_attention_interval": INTERVAL,
        "ssm.inner_size": inner,
        "ssm.conv_kernel": KERNEL,
        "ssm.state_size": HEAD,
        "ssm.time_step_rank": shape.heads,
        "ssm.group_count": shape.heads,
    }
    for key, value in numbers.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", EPSILON)
    writer.add_float32("qwen35.rope.freq_base", BASE)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    rare = byte_letters()[-2:]
    tokens = [*MARKERS, *byte_letters(), "".join(rare)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(MARKERS) + [1] * 257)
    writer.add_token_merges([" ".join(rare)])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    named: dict[str, Tensor] = {name: model[name] for name in model.names}
    for at, block in enumerate([*model.blocks, model.head]):
        named |= {f"blk.{at}.{name}": block[name] for name in block.names}
    for name, tensor in named.items():
        values = tensor.detach().cpu()
        array = (-values.exp() if name.endswith("ssm_a") else values).numpy().astype(np.float32)
        if values.ndim == 1 or "conv1d" in name:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, _KIND), raw_dtype=_KIND)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with an MTP layer.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", choices=SIZES, help="large with a GPU, else small")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(arguments.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = SIZES[arguments.size or ("large" if device == "cuda" else "small")]
    torch.set_float32_matmul_precision("high")
    model, text = Model(shape).to(device), read_text().to(device)
    weights = sum(each.numel() for each in model.parameters())
    print(f"{weights / 1e6:.1f} M weights, {len(text) / 2**20:.1f} MiB of text, on {device}", flush=True)
    train(model, text, arguments.minutes or shape.minutes)
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    write(model, arguments.file)
    print(f"wrote {arguments.file}")


if __name__ == "__main__":
    main()
