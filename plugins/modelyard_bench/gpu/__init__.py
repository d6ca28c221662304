"""`modelyard bench --gpu MODEL`: many streams of one model, beside llama-server or vLLM on the same machine."""
