from vllm.exceptions import VLLMServerError


class EngineDeadError(VLLMServerError):
    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")
