"""Images and sounds are decoded in a child process, to what libmtmd itself makes of them."""

from __future__ import annotations

import base64
import ctypes
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import media_decoding
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.media import Projector
from modelyard.engines.llama_cpp.media_decoding import decoded_audio, decoded_image
from modelyard.engines.llama_cpp.options import Options
from modelyard.processes.sandbox import Limits, pool
from tests.engines.llama_cpp.media_files import picture, require_libmtmd, sound
from tests.engines.llama_cpp.tiny_models import seeing
from tests.engines.test_media_checks import flac

RATE = 16000
STEREO = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 0, b"WAVE", b"fmt ", 16, 1, 2, 44100, 176400, 4, 16, b"data", 40000)
STEREO += np.tile(np.sin(np.arange(5000) / 9) * 9000, (2, 2)).T.astype("<i2").tobytes()
MP3 = base64.b64decode("""
//uQZAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAWGluZwAAAA8AAAAFAAAJEABwcHBwcHBwcHBwcHBwcHBwcHBwmpqampqampqampqampqamp
qampqvr6+vr6+vr6+vr6+vr6+vr6+vr8fHx8fHx8fHx8fHx8fHx8fHx8fH//////////////////////////8AAAA8TEFNRTMuMTAwBK8AAAAAAAAAADUg
JAMGTQABzAAACRDiURUiAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA
AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA//vQRAAAAzEJVNU8AApiATq6pgQBUCSrUf
nnhAHiFWu/OPKAAAAIu/WW4NWIeONbLoDYANAIAsCFq9PqNXs7+PcAAAAQJDw8f/gAA7+h5//gI/D//Af/9DP//H//pHf+h//+CAwAAA8PDw8MAAAAAA8P
Dw8MAAAAAA8PDw9IAAHiA8P/8BH/7//9AAAEXftbevXmZmZr/YWEsQwJgBgBgfJ5++AAAABAnDw9/4ABn/HD//wB3mf/o3/+YB/8Az/+OAO/ADH/4eAO/A
DH/84A7+Ix//sA//zf/+AAAAAAYeHh4eAAAAAIw8PDx4AAAAApajAbAaBYKBgKBgAAYAIDBgCh+GAoCQYl7dECGAqBwYOgD7AjX+DiJQFwcM5JTA3AYMBU
BgICShZgcgKPuGaDlJ8l/xbT+NJDWF1/zSYVanbW3X/9TIcczCrc6xj//9OwlcroL3/////9WwnzFBevf4NBUFREe/1gqIgqCoiEOAAAFCAGANgnDAgDAo
AAEIAAQKrEgbU2MOFsxCIjATFLOG3Eg+QUIhnkCGAwIfDAQsLDJoSayT0hJPlX+Lafx1KFhdf8W4/TRLba26//n8aRblKhtdWxv//q2E+YoL3/////9Wwn
z6C9e/xEFQVER7/WCoiCoKiJhQA0X+AAAAAuaW5AAGh5ARreOaANhgCDgVL5AMgCa932IztxJ/4EgBHAAAACy2Utqjy9BZ5VJkSfQhCjBQA6EpAQa+WTWp
+lAR6MGAMjfwA7ZdxraJgVAzXs07YNSw4pLLrCI3rHsZu5G6QDDvDwnuANaisPwhaXwKNicQMEQbCrMKorZZVzAJRf4AAAAEJRallSAkQgxpH4aODMtNpC
4LXkvQGvcOx79Qd4+E/4AAAAdZwQodqmJa3I+ZciDSG0LUFwi5gCm36AO4gHXYWXAgINDwg4IKQrOCCyiw6ExFSX4M7fyNhgd4eEfwBmUyz5sPpfAI2Jwh
IiTIrLfSa2WXUAdG/gAAAAQklukMQLAQAkyLAzhB2JIBV3MtS+UunevzPXqQ7x8J/wAAAA5SBVn3qAlmcj4oyINIbTyyKwRcwAjb/AIykeu8RABfQ2yXNd
HwcDiQGtNB9Fdc9vrf/7cESugzEmCdT3bCAIJeFaju2YAQQsJVHN6wQoZQSqeNxsxWIclgQR+yIABQAKnamnIXsWIIwFN1o6m4MAh4EPCPBILZRDj8V+lQ
bJMcEAAEQKA4BHIrGFAoHAYAjDAwxYzWjGKMDGBBjA/BF4wAIANGQBgmFIjAfweAwhsAXMCZBCzAJwCgwAQAhMO8AjDAVQCkxRIFOMD0AgjAHAAVtQhOWo
OCpMuNk6mMIbSGwgeAiiYCDrMkA1ufqcRwDAcXp2HQC5LWef/+4qY7J0JBch9nKa1KYz///+6ip13uusRnDs1rVb8v////fhl7/xd+KSxljS0tamjX////
/8/hynjc+/j+RSrSymtTU2OOP///////L6e3LKSxTg+cwaEoSPf4YB8CAgD4EBISnVf//gPGABBqCKNpX/+zBE9gMxGQlUc3hhmhqBKq43TDVEYCVNzm8E
KGSEqngcbFUJQdCwbAAAAAw28PeM7O1qjAuARYwPIX6LYmACgGBhjYAkYEsEMgoIbMCoAvjASQFAAgDhjv4KCYFwA2GRrgjJgZIEKYA6ADPe8j/nUNRnhN
SyrvcAcKGHgKYb/TL+//+09gljCM1qam///8qmFPTiU70ggAwe/Aj/+0BE9QMxIAlUcxzQihrBKq4BegNEZCdT1bEAKJOFqbq2kAQYPywVBVJJRkIzQAA5
gB0AKg6kmPScJdgjxcVIaSijQWFOqGwUAhKJxJL5BT+BP/0FbBXQhkIb0F6CiJCAkbSAAAAQV02Fwb7hkJeKTEFNRTMuMTAwqqqqqqqqqqqqqqqqqqqqqq
qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqv/7kGT6gAccSFL+f0SAhMN6T8/sgAacNx+c8wAoRwBn+4IABaqqqqqqqqqq
qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq
qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq
qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq
qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq
qqqqqqqqqqqqqqqqqqqqqqqqqg==
""")
FLAC = base64.b64decode("""
ZkxhQwAAACIQABAAAACbAASvCsRA8AAAETqoRY8xGZplkrh0r+HyxMrzhAAAKCAAAAByZWZlcmVuY2UgbGliRkxBQyAxLjQuMyAyMDIzMDYyMwAAAAD/+M
kIAJVCAAAEArU/5gAAAcpKSlOUvpZZNM88OZOTMKGSSYTCSGGTJMKFCZkkwnKc5SUyykTPLOU8w5MKFCUMkmFCYZCTJhhMKTJmGSYfMnPOUKlPk5nMpJhQ
yZkmGSQzJJJJJJkkwlDmGYcKeaFJcyl+UzmclMMkw4ZMmYUMkhhJJhJJkmQpMwoZlDss+XpfmUpzyYYZJwoYUJIZITIZIZmSZMKZM4UKeFMsppuc8pKTks
zhkwySQoZhkkhMwmGSTDk5KHk80lMp/TPSmZ8/KYckyYTDJMJJMMzJMySeZzM//JpZZT5czNJZyTMkkwyTJITDJJk4ShlCnmeZnOZfpSlk+UlJTmYchhMw
kyQySEwlDDDIUM8pzM5Qpf7znMyeTyUnJk5MMkkkkhyFDDJkzDKfznpPOUqZppl5KZnCmTMMw5ChMhJMmGGSUMMkmhPlKHlKc9mhZKZTOYUmZhySGYTJmE
MMmScJJkySSYZTOcpQsl/5Tk5ycOSck5mTJkkkkkkMKGTMyYZJlCylKGm+50zSyUzJhw4ZJOQwwwkkkMyZMzJMyTChlDSc+U3nlPzPJkOEzMkMkmGQyGE5
JJJJJmZMyT5nmZT6eU055KYZJJkkzMMJJmEkkmGYcJknJKHJyU+U0zfKZQvlOUmZDk4cMkyZITCYZDMKSZQpM5hTnmZcqbl0KUKTylOSZMMMySSGGSGSTI
ZJKGZQpnCzz6fS8oUznKSnlMOTMmYZJJDDMkOFCZJhSUymShp8//mXlPM5Qp4ZkzJySYYQoZMkycySU8pnOFNKc7KaFPlDQoU5KZJhkyGSZgYZDMOGTJhk
0+ZoUKecpdNPyhTOTmSkmSZhOQyGSSQwyYYcOGSw5SUlKcpfSyyaZ54cycmYUMkkwmEkMMmSYUKEzJJhOU5ykpllImeWcp5hyYUKEoZJMKEwyEmTDCYUmT
MMkw+ZOecoVKfJzOZSTChkzJMMkhmSSSSSTJJhKHMMw4U80KS5lL8pnM5KYZJhwyZMwoZJDCSTCSTJMhSZhQzKHZZ8vS/MpTnkwwyThQwoSQyQmQyQzMky
YUyZwoU8KZZTTc55SUnJZnDJhkkhQzDJJCZhMMkmHJyUPJ5pKZT+melMz5+Uw5JkwmGSYSSYZmSZkk8zmZ/+TSyyny5maSzkmZJJhkmSQmGSTJwlDKFPM8
zOcy/SlLJ8pKSnMw5DCZhJkhkkJhKGGGQoZ5TmZyhS/3nOZk8nkpOTJyYZJJJJDkKGGTJmGU/nPSecpUzTTLyUzOFMmYZhyFCZCSZMMMkoYZJNCfKUPKU5
7NCyUymcwpMzDkkMwmTMIYZMk4STJkkkwymc5ShZL/ynJzk4ck5JzMmTJJJJJIYUMmZkwyTKFlKUNN9zpmlkpmTDhwySchhhhJJIZkyZmSZkmFDKGk58pv
PKfmeTIcJmZIZJMMhkMJySSSSTMyZknzPMyn08ppzyUwySTJJmYYSTMJJJMMw4TJOSUOTkp8ppm+UyhfKcpMyHJw4ZJkyQmEwyGYUkyhSZzCnPMy5U3LoU
oUnlKckyYYZkkkMMkMkmQySUMyhTOFnn0+l5QpnOUlPKYcmZMwySSGGZIcBjn//4eQgBATmwStCQ01jWTtlu3LTgHrSuNdT4kIMJ358AIiQSEKERYkShWJ
al3XXvnP3H+5740d2natJKiJJChCwkIiEREIkQiIiFCJIUJEkVC1ZdV7o7aP2+Gm0aO+jVVlykWkUUFiRCQiCRBIQoQiCiCUESRFJQsmXS9adtZ3v80c4+
j10arUuiWiKQoREiEhEQiChIgkgkQpWy
""")


@pytest.fixture(scope="module")
def projector() -> Iterator[Projector]:
    require_libmtmd()
    model, file = seeing("audio")
    params = lib.llama_model_default_params()
    params.n_gpu_layers, params.no_alloc, params.load_mode = 0, True, 0
    raw = lib.llama_model_load_from_file(str(model).encode(), params)
    made = Projector(file, raw, Options(path=str(model), mmproj=str(file)), 1, gpu=False)
    yield made
    made.close()
    lib.llama_model_free(raw)


def decoded_here(projector: Projector, data: bytes) -> bytes:
    mtmd = projector._mtmd
    options = mtmd.mtmd_helper_init_opt_default()
    bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(projector._raw, data, len(data), False, options).bitmap
    found = ctypes.string_at(mtmd.mtmd_bitmap_get_data(bitmap), mtmd.mtmd_bitmap_get_n_bytes(bitmap))
    mtmd.mtmd_bitmap_free(bitmap)
    return found


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP"])
def test_pixels_are_those_that_libmtmd_makes(projector: Projector, format: str) -> None:
    data = picture(3, (123, 77), format)
    assert decoded_image(data) == (123, 77, decoded_here(projector, data))


@pytest.mark.parametrize("size", [(2, 2), (-1, -1), (0, 0)])
def test_pixels_that_are_fewer_than_a_broken_child_says_never_reach_libmtmd(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_decoding.pool, "call", lambda *_: (*size, b"abc"))
    with pytest.raises(InvalidRequest, match="an image cannot be read"):
        decoded_image(b"")


@pytest.mark.parametrize("data", [sound(2), STEREO, MP3, FLAC], ids=["wav", "stereo", "mp3", "flac"])
def test_samples_are_those_that_libmtmd_makes(projector: Projector, data: bytes) -> None:
    """But for the last bits: they depend on the compiler."""
    here, there = (np.frombuffer(each, "<f4") for each in (decoded_here(projector, data), decoded_audio(data, RATE)))
    assert abs(len(here) - len(there)) <= 1
    assert len(there) > 1000
    count = min(len(here), len(there))
    assert np.abs(here[:count] - there[:count]).max() < 3e-5
    assert np.abs(there).max() > 0.1


@pytest.mark.parametrize("data", [flac(RATE), MP3[:20], sound(1)[:30]])
def test_a_damaged_sound_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="an audio part"):
        decoded_audio(data, RATE)


def test_a_decoder_that_exceeds_a_limit_is_an_error_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that crashes: the pool tells both in the same way."""
    require_libmtmd()
    monkeypatch.setattr(media_decoding.decode_image, "limits", Limits(wall_s=0.001))
    with pytest.raises(InvalidRequest, match=r"an image cannot be read: it takes longer than 0\.001 s"):
        decoded_image(picture(1, (3000, 2000), "PNG"))
    assert pool.call(media_decoding.decode_audio, sound(1), RATE)


def test_without_the_package_a_sound_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_decoding, "find_spec", lambda _name: None)
    with pytest.raises(InvalidRequest, match=r"pip install 'modelyard\[media\]'"):
        decoded_audio(sound(1), RATE)
