from __future__ import annotations

import random

import pytest

from modelyard.core.errors import InvalidRequest, NotFound, Unavailable
from modelyard.library import variants
from modelyard.library.variants import KvShape, MemoryBudget, choose_variant, find_variants, named_variant

GB = 2**30


def test_the_quantization_is_detected_in_the_name():
    cases = [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2-135m-instruct-q8_0.gguf", "Q8_0"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("BF16/Model-BF16-00001-of-00002.gguf", "BF16"),
        ("UD-Q6_K_XL/MiMo-V2-Flash-UD-Q6_K_XL-00001-of-00006.gguf", "UD-Q6_K_XL"),
        ("IQ3_XXS/model.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("qwen2.5-0.5b-instruct-fp16.gguf", "F16"),
        ("plain.gguf", "plain"),
    ]
    for name, label in cases:
        assert [variant.label for variant in find_variants({name: 1})] == [label]


def test_projectors_importance_matrices_and_paths_outside_the_folder_are_no_models():
    names = ("../../x.gguf", "/etc/x.gguf", "a/../../x.gguf", "imatrix.gguf", "mmproj-F16.gguf", "x-mmproj-f16.gguf")
    assert find_variants(dict.fromkeys(names, 1)) == []


def test_the_parts_of_a_split_variant_are_in_order():
    names = [f"m-Q8_0-0000{n}-of-00003.gguf" for n in (3, 1, 2)]
    (only,) = find_variants(dict.fromkeys(names, 7))
    assert (only.files, only.size) == (tuple(sorted(names)), 21)


def test_quantizations_are_ordered_by_quality():
    expected = ["F16", "Q8_0", "UD-Q6_K_XL", "Q6_K", "Q5_K_M", "UD-Q4_K_XL", "Q4_K_L", "Q4_K_M", "Q4_K_S", "IQ4_XS"]
    expected += ["Q4_0", "Q3_K_M", "IQ3_XXS", "Q2_K", "UD-IQ2_M", "IQ2_M", "IQ1_S", "what"]
    mixed = random.Random(1).sample(expected, len(expected))
    assert sorted(mixed, key=variants.quality_rank) == expected


SIZES = {
    "m-F16.gguf": 16 * GB,
    "m-Q8_0.gguf": 8 * GB,
    "m-Q6_K.gguf": 6 * GB,
    "m-Q4_K_M.gguf": 5 * GB,
    "m-IQ2_M.gguf": 3 * GB,
}


@pytest.mark.parametrize(
    ("budget", "label", "reason"),
    [
        (
            MemoryBudget(64 * GB),
            "Q8_0",
            "it takes 10.4 GiB with the KV of 16384 tokens, and 64.0 GiB of memory",
        ),
        (MemoryBudget(9 * GB), "Q6_K", "9.0 GiB of memory"),
        (MemoryBudget(64 * GB, 8 * GB), "Q4_K_M", "8.0 GiB of GPU memory"),
        (
            MemoryBudget(64 * GB, 4 * GB),
            "Q4_K_M",
            "nothing fits the 4.0 GiB of GPU memory, so it is shared between",
        ),
    ],
)
def test_the_best_quantization_that_fits_is_chosen_and_explained(budget: MemoryBudget, label: str, reason: str):
    choice = choose_variant("r", find_variants(SIZES), budget, KvShape(131_072, 40_000))
    assert choice.variant.label == label
    assert reason in choice.reason
    assert "Others with --quant: " in choice.reason


def test_sixteen_bits_are_chosen_only_if_there_is_nothing_smaller():
    only = find_variants({"m-F16.gguf": GB})
    assert choose_variant("r", only, MemoryBudget(64 * GB)).variant.label == "F16"
    two = find_variants({"m-F16.gguf": GB, "m-F32.gguf": 2 * GB})
    assert choose_variant("r", two, MemoryBudget(64 * GB)).variant.label == "F16"


def test_a_model_that_does_not_fit_is_not_fetched_unless_it_is_named():
    with pytest.raises(Unavailable, match=r"the smallest variant, IQ2_M, takes .* name it: --quant IQ2_M"):
        choose_variant("r", find_variants(SIZES), MemoryBudget(2 * GB))
    assert named_variant("r", find_variants(SIZES), "f16").label == "F16"


def test_a_repository_with_several_models_asks_which():
    with pytest.raises(InvalidRequest, match=r"has 2 models: choose one with --quant: big-Q4_0\.gguf .*small-Q"):
        choose_variant("r", find_variants({"big-Q4_0.gguf": 5, "small-Q8_0.gguf": 6}), MemoryBudget(GB))


def test_two_files_of_one_quantization_are_selected_by_name():
    found = find_variants({"a-Q4_0.gguf": 5, "b-Q4_0.gguf": 6})
    with pytest.raises(InvalidRequest, match=r"a-Q4_0\.gguf \(5 B\), b-Q4_0\.gguf \(6 B\)"):
        named_variant("r", found, "Q4_0")
    assert named_variant("r", found, "B-Q4_0.gguf").files == ("b-Q4_0.gguf",)
    with pytest.raises(NotFound, match=r"r has no 'Q1'; it has Q4_0 \(5 B\)"):
        named_variant("r", found, "Q1")


def test_a_dynamic_quantization_is_found_without_its_prefix():
    assert named_variant("r", find_variants({"m-UD-Q4_K_XL.gguf": 5}), "q4_k_xl").label == "UD-Q4_K_XL"


def test_the_projector_in_f16_is_preferred_and_one_beside_the_model_comes_first():
    (model,) = find_variants({"sub/m-Q4_0.gguf": 1})
    choice = variants.choose_projector({"mmproj-F32.gguf": 3, "mmproj-BF16.gguf": 2, "mmproj-F16.gguf": 2}, model)
    assert choice is not None
    assert choice.file == "mmproj-F16.gguf"
    assert "(not BF16, F32)" in choice.reason
    choice = variants.choose_projector({"mmproj-F16.gguf": 3, "sub/mmproj-BF16.gguf": 2}, model)
    assert choice is not None
    assert choice.file == "sub/mmproj-BF16.gguf"
    assert variants.choose_projector({"m.gguf": 1}, model) is None


def test_the_kv_of_a_token_follows_from_the_metadata():
    llama = {
        "general.architecture": "llama",
        "llama.block_count": 32,
        "llama.attention.head_count": 32,
        "llama.attention.head_count_kv": 8,
        "llama.embedding_length": 4096,
        "llama.context_length": 131_072,
    }
    assert variants.kv_shape(llama) == KvShape(2 * 32 * 8 * 256, 131_072)
    assert variants.kv_shape({}) == KvShape()


def test_the_format_of_a_repository_follows_from_its_files():
    assert variants.repo_format({"m.gguf": 1, "config.json": 1, "model.safetensors": 1}) == "gguf"
    assert variants.repo_format({"config.json": 1, "model-00001-of-00002.safetensors": 1}) == "hf"
    assert variants.repo_format({"config.json": 1, "model.bin": 1, "vocabulary.json": 1}) == "ct2"
    assert variants.repo_format({"README.md": 1, "original/model.safetensors": 1, "config.json": 1}) is None


def test_a_folder_has_its_weights_once_and_no_pictures():
    sizes = dict.fromkeys(
        ("config.json", "model.safetensors", "consolidated.safetensors", "x.png", "tokenizer.model", "onnx/m.json"), 1
    )
    assert variants.folder_files(sizes, "hf") == ("config.json", "model.safetensors", "tokenizer.model")


def test_the_best_branch_up_to_six_bits_is_chosen():
    branches = {"2.0bpw": 2 * GB, "4.0bpw": 4 * GB, "6.0bpw": 6 * GB, "8.0bpw_H8": 8 * GB}
    assert variants.choose_branch("r", branches, MemoryBudget(0, 40 * GB))[0] == "6.0bpw"
    assert variants.choose_branch("r", branches, MemoryBudget(0, 6 * GB))[0] == "4.0bpw"
    with pytest.raises(Unavailable, match="does not fit this machine"):
        variants.choose_branch("r", branches, MemoryBudget(0, GB))
    assert variants.sized_branches(["main", "4.0bpw", "measurement"]) == ["4.0bpw"]
