"""OpenAI's Decisions for local models: `POST /v1/decisions`, 1 to 400 questions about one input.

    {"model": "m", "input": "I was charged twice.", "questions": [
        {"type": "predicate", "name": "angry", "instructions": "The customer is angry."},
        {"type": "choice", "instructions": "What is it about?", "choices": [{"value": "billing"}, {"value": "other"}]},
        {"type": "score", "instructions": "How urgent is it?", "levels": [{"label": "low"}, {"label": "high"}]}]}
    {"model": "m", "answers": [{"type": "predicate", "name": "angry", "probability": 0.8}, …], "usage": {…}}

`wire` reads and writes these objects, `scoring` asks the model. Nothing is generated: the model reads the input once,
each question continues from its KV, and an option's probability is that of its whole text as the answer, normalised
over the options of its question.
"""
