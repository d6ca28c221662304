"""Which files of a repository are which variant."""

from __future__ import annotations

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.library.huggingface import choose_variant, find_variants


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2-135m-instruct-q8_0.gguf", "Q8_0"),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("BF16/Model-BF16-00001-of-00002.gguf", "BF16"),
        ("UD-Q6_K_XL/MiMo-V2-Flash-UD-Q6_K_XL-00001-of-00006.gguf", "UD-Q6_K_XL"),
        ("IQ3_XXS/model.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("plain.gguf", "plain"),
    ],
)
def test_the_quantization_is_read_from_the_name(name: str, label: str):
    assert [variant.label for variant in find_variants({name: 1})] == [label]


def test_a_file_that_would_land_elsewhere_is_no_file_of_ours():
    assert find_variants({"../../x.gguf": 1, "/etc/x.gguf": 1, "a/../../x.gguf": 1, "imatrix.gguf": 1}) == []


def test_two_files_of_one_quantization_are_told_apart_by_name():
    found = find_variants({"a-Q4_0.gguf": 5, "b-Q4_0.gguf": 6})
    with pytest.raises(InvalidRequest, match=r"a-Q4_0\.gguf \(5 B\), b-Q4_0\.gguf \(6 B\)"):
        choose_variant("r", found, "Q4_0")
    assert choose_variant("r", found, "B-Q4_0.gguf").files == ("b-Q4_0.gguf",)


def test_the_parts_of_a_split_variant_are_one_in_order():
    names = [f"m-Q8_0-0000{n}-of-00003.gguf" for n in (3, 1, 2)]
    (only,) = find_variants(dict.fromkeys(names, 7))
    assert (only.files, only.size) == (tuple(sorted(names)), 21)
    assert choose_variant("r", [only], None) is only
