import time
from tests.e2e.test_llama_cpp import *
def test_dbg(sdk):
    for choice in ("required","auto","required","auto","none"):
        for i in range(2):
            t=time.time(); c=time.process_time()
            test_a_response_schema_does_not_prevent_calls.__wrapped__ if 0 else None
            r=sdk.chat.completions.create(model="smollm2",messages=[{"role": "user", "content": "What is the weather in Rome? Use a tool."}],tools=CHAT_TOOLS,tool_choice=choice,parallel_tool_calls=False,response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}},max_tokens=96,temperature=0)
            print(choice,i,round(time.time()-t,2),"cpu",round(time.process_time()-c,2),r.usage.completion_tokens, flush=True)
    assert 0
