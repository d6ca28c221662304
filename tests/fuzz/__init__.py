"""The fuzzer: random but well-aimed input for every interface, in `make test` briefly and by `make fuzz` for long.

Schemas come from the code: the OpenAPI document for HTTP, the structs of `workers/messages.py` for frames.
"""
