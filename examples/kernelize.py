"""FlashRT's layers through ``kernels.kernelize``, without structures.

Replaces what transformers marks as replaceable (its norms and activations), and the MLP, which a
line of our own marks. A transformers that wants another version of kernels than the one installed
marks nothing, silently; then only the MLPs are replaced. ``kernels`` warns that the mapping has no
`rotary_pos_emb`: it stays the host's. Runs on a tiny random model, on a GPU (in
bf16, as the linear kernels take no fp32 there) or without.

    python examples/kernelize.py
"""

import kernels
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import flash_rt  # noqa: F401 - shows the local kernel builds to the kernels library
from flash_rt.structures import layer_mapping


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = Qwen3Config(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    kernels.replace_kernel_forward_from_hub(Qwen3MLP, "SwiGLUMLP")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(device, dtype).eval()
    ids = torch.arange(16, device=device)[None]

    with torch.no_grad():
        expected = model(ids).logits
        with kernels.use_kernel_mapping(layer_mapping(), inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device=device)
        logits = model(ids).logits

    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    difference = ((logits - expected).float().norm() / expected.float().norm()).item()
    print(f"{len(replaced)} layers replaced on {device}, for instance {replaced[0]}")
    print(f"relative difference of the logits: {difference:.1e}")


if __name__ == "__main__":
    main()
