"""Trains a small model of the shape of Qwen 3.5 with an MTP layer, and writes it as a GGUF file.

    python3 -m venv DIR && DIR/bin/pip install torch numpy gguf
    DIR/bin/python bench/mtp_train.py FILE [--minutes 12] [--threads 2]

It reads what is on every machine, Python's library and this project's documentation, byte by byte: gated delta nets in
three of four layers, attention with a gate in the fourth, and behind them one layer that predicts the token after the
next one. Nothing here needs Modelyard. `python -m bench.mtp FILE` measures with the file.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 as everybody calls it

WIDTH, HEADS, HEAD, FEED, LAYERS, INTERVAL = 128, 2, 64, 384, 8, 4
KERNEL, EPSILON, BASE = 4, 1e-6, 10_000.0
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = len(MARKERS) + 256 + 1  # llama.cpp wants a merge: one of two bytes that no text has
LENGTH, BATCH = 128, 12
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # it continues texts


# --- the text ---------------------------------------------------------------------------------------------------------


def read_text() -> Tensor:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(library.glob("*.py")), *sorted((library / "asyncio").glob("*.py"))]
    files += sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    data = b"\n".join(file.read_bytes() for file in files)
    return torch.from_numpy(np.frombuffer(data, np.uint8).astype(np.int64) + len(MARKERS))


# --- the model --------------------------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPSILON)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions, the halves of a head paired."""
    half, positions = HEAD // 2, torch.arange(x.shape[2], dtype=torch.float32)
    angles = positions[:, None] * BASE ** (-torch.arange(half) / half)
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
    def __init__(self, *, recurrent: bool, head: bool = False) -> None:
        self_shapes: dict[str, tuple[int, ...]] = {"attn_norm.weight": (WIDTH,), "post_attention_norm.weight": (WIDTH,)}
        self_shapes |= {f"ffn_{name}.weight": (FEED, WIDTH) for name in ("gate", "up")}
        self_shapes["ffn_down.weight"] = (WIDTH, FEED)
        inner = HEADS * HEAD
        if recurrent:
            self_shapes |= {"attn_qkv.weight": (3 * inner, WIDTH), "attn_gate.weight": (inner, WIDTH)}
            self_shapes |= {"ssm_conv1d.weight": (3 * inner, KERNEL), "ssm_dt.bias": (HEADS,), "ssm_a": (HEADS,)}
            self_shapes |= {f"ssm_{name}.weight": (HEADS, WIDTH) for name in ("beta", "alpha")}
            self_shapes |= {"ssm_norm.weight": (HEAD,), "ssm_out.weight": (WIDTH, inner)}
        else:
            self_shapes |= {"attn_q.weight": (2 * inner, WIDTH), "attn_output.weight": (WIDTH, inner)}
            self_shapes |= {f"attn_{name}.weight": (inner, WIDTH) for name in "kv"}
            self_shapes |= {f"attn_{name}_norm.weight": (HEAD,) for name in "qk"}
        if head:
            self_shapes |= {"nextn.eh_proj.weight": (WIDTH, 2 * WIDTH)}
            self_shapes |= {f"nextn.{name}.weight": (WIDTH,) for name in ("enorm", "hnorm", "shared_head_norm")}
        super().__init__(self_shapes)
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        inner = norm(x, self["attn_norm.weight"])
        x = x + (self.delta(inner) if self.recurrent else self.attention(inner))
        inner = norm(x, self["post_attention_norm.weight"])
        gated = F.silu(inner @ self["ffn_gate.weight"].T) * (inner @ self["ffn_up.weight"].T)
        return x + gated @ self["ffn_down.weight"].T

    def attention(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, gate = (x @ self["attn_q.weight"].T).view(batch, length, HEADS, 2 * HEAD).chunk(2, -1)
        key, value = ((x @ self[f"attn_{n}.weight"].T).view(batch, length, HEADS, HEAD).transpose(1, 2) for n in "kv")
        query = rotate(norm(query, self["attn_q_norm.weight"]).transpose(1, 2))
        key = rotate(norm(key, self["attn_k_norm.weight"]))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return (out * gate.sigmoid()).reshape(batch, length, -1) @ self["attn_output.weight"].T

    def delta(self, x: Tensor) -> Tensor:
        """The gated delta rule over the whole text at once: what each token changes in the state is the solution of a
        triangular system, because it depends on what the tokens before it have changed."""
        batch, length, _ = x.shape
        mixed = (x @ self["attn_qkv.weight"].T).transpose(1, 2)
        mixed = F.silu(
            F.conv1d(F.pad(mixed, (KERNEL - 1, 0)), self["ssm_conv1d.weight"][:, None], groups=mixed.shape[1])
        )
        query, key, value = (part.view(batch, HEADS, HEAD, length).transpose(2, 3) for part in mixed.chunk(3, 1))
        query, key = F.normalize(query, dim=-1, eps=EPSILON), F.normalize(key, dim=-1, eps=EPSILON)
        beta = (x @ self["ssm_beta.weight"].T).sigmoid().transpose(1, 2)[..., None]
        steps = F.softplus(x @ self["ssm_alpha.weight"].T + self["ssm_dt.bias"]).transpose(1, 2)
        total = (steps * -self["ssm_a"].exp()[:, None]).cumsum(-1)
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        changes = beta * decay * (key @ key.transpose(2, 3))
        changes = changes.tril(-1) + torch.eye(length)
        changed = torch.linalg.solve_triangular(changes, beta * value, upper=False, unitriangular=True)
        out = (decay * (query @ key.transpose(2, 3)) / math.sqrt(HEAD)) @ changed
        gate = (x @ self["attn_gate.weight"].T).view(batch, length, HEADS, HEAD)
        out = norm(out.transpose(1, 2), self["ssm_norm.weight"]) * F.silu(gate)
        return out.reshape(batch, length, -1) @ self["ssm_out.weight"].T


class Model(Weights):
    def __init__(self) -> None:
        super().__init__(
            {"token_embd.weight": (VOCAB, WIDTH), "output.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
        )
        self.blocks = nn.ModuleList(Block(recurrent=(at + 1) % INTERVAL != 0) for at in range(LAYERS))
        self.head = Block(recurrent=False, head=True)

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

    def loss(self, ids: Tensor) -> tuple[Tensor, list[float]]:
        """Of the model, of the head's guess, and of the guess after it, from the head's own hidden rows."""
        hidden = self.hidden(ids[:, :-1])
        parts = [self.cross_entropy(hidden, ids[:, 1:])]
        for step in (1, 2):
            hidden = self.head_hidden(ids[:, step:-1], hidden[:, : ids.shape[1] - 1 - step])
            parts.append(self.cross_entropy(hidden, ids[:, step + 1 :]))
        return parts[0] + 0.3 * parts[1] + 0.15 * parts[2], [float(part.detach()) for part in parts]

    def cross_entropy(self, hidden: Tensor, ids: Tensor) -> Tensor:
        logits = hidden @ self["output.weight"].T
        return F.cross_entropy(logits.reshape(-1, VOCAB), ids.reshape(-1))


def train(model: Model, text: Tensor, minutes: float) -> None:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], betas=(0.9, 0.95))
    began, step, share = time.monotonic(), 0, 0.0
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (0.05 + 0.95 * (1 - share))
        starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,))
        loss, parts = model.loss(torch.stack([text[at : at + LENGTH + 1] for at in starts.tolist()]))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, share = step + 1, (time.monotonic() - began) / (60 * minutes)
        if step % 25 == 1:
            print(f"{share:4.0%} step {step}: " + " ".join(f"{part:.3f}" for part in parts), flush=True)


# --- the file ---------------------------------------------------------------------------------------------------------


def byte_letters() -> list[str]:
    """The letters that GPT-2 writes for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write(model: Model, path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen35")
    numbers: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_length": 4096,
        "embedding_length": WIDTH,
        "block_count": LAYERS + 1,
        "nextn_predict_layers": 1,
        "feed_forward_length": FEED,
        "attention.head_count": HEADS,
        "attention.head_count_kv": HEADS,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.dimension_count": HEAD,
        "full_attention_interval": INTERVAL,
        "ssm.inner_size": HEADS * HEAD,
        "ssm.conv_kernel": KERNEL,
        "ssm.state_size": HEAD,
        "ssm.time_step_rank": HEADS,
        "ssm.group_count": HEADS,
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
        values = tensor.detach()
        values = -values.exp() if name.endswith("ssm_a") else values
        kind = np.float32 if values.ndim == 1 or "conv1d" in name else np.float16
        writer.add_tensor(name, values.numpy().astype(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with an MTP layer.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    torch.set_num_threads(arguments.threads)
    model, text = Model(), read_text()
    print(
        f"{sum(each.numel() for each in model.parameters()) / 1e6:.1f} M weights, {len(text) / 2**20:.1f} MiB of text"
    )
    with torch.no_grad():
        for block in model.blocks:
            if block.recurrent:
                block["ssm_a"].copy_(torch.linspace(-4.0, 0.0, HEADS))
                block["ssm_dt.bias"].zero_()
    train(model, text, arguments.minutes)
    write(model, arguments.file)
    print(f"wrote {arguments.file}")


if __name__ == "__main__":
    main()
