from tests.e2e.test_llama_cpp import *
def test_dbg(server):
    reply = call_apply_patch(server, SHORT_GRAMMAR, "required", temperature=1.5, seed=1, max_output_tokens=100)
    import json; print(json.dumps({k:reply[k] for k in ("status","incomplete_details","output","usage")}, indent=1)); assert 0
