"""Names that options may have as values. `-` and `_` spellings are those of SGLang's and vLLM's users."""

REASONING_PARSERS = (
    "deepseek-r1", "deepseek_r1", "deepseek-v3", "deepseek_v3", "glm45", "interns1", "kimi", "kimi_k2",
    "mimo", "mistral", "qwen3", "qwen3-thinking", "step3",
)  # fmt: skip
TOOL_CALL_PARSERS = ("hermes", "json", "llama3", "llama3_json", "mistral", "qwen", "qwen25", "qwen3")
HARMONY_PARSERS = ("gpt-oss", "openai", "openai_gptoss")  # of reasoning and of calls, which are one format
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
AUX_LAYER_IDS = ("auto", "output", "boundary")

# What other servers' --quantization has for checkpoints that are quantised: here that is read from their config.
OF_CHECKPOINTS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "mxfp4", "gguf")

# Other spellings of --dtype, by that which is used here.
DTYPE_SPELLINGS = {
    "half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32",
}  # fmt: skip
