"""Answer with a LoRA adapter and without it, in one batch."""

import argparse

from quire import LLM, LoRARequest, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="the model that the adapter was trained on")
    parser.add_argument("--adapter", required=True, help="a directory in PEFT's format")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()
    adapter = LoRARequest("my-adapter", 1, args.adapter)
    params = SamplingParams(temperature=0, max_tokens=32)
    with LLM(args.model, enable_lora=True, max_lora_rank=64) as llm:
        outputs = llm.generate([args.prompt] * 2, params, lora_request=[None, adapter], use_tqdm=False)
    for name, output in zip(("model", "with adapter"), outputs, strict=True):
        print(f"{name}: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
