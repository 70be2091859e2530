"""Models of transformers with two layers of width 32, made from configs, and sequences for them."""

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {"vocab_size": 60, **SIZES}
EOS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def bert() -> hf.PreTrainedModel:
    return hf.BertForMaskedLM(hf.BertConfig(**TEXT, max_position_embeddings=64))


def roberta() -> hf.PreTrainedModel:
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**TEXT, max_position_embeddings=64, pad_token_id=0))


def modernbert(window: int = 64) -> hf.PreTrainedModel:
    config = hf.ModernBertConfig(
        **TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        local_attention=2 * window, global_attn_every_n_layers=2,
    )  # fmt: skip
    return hf.ModernBertForMaskedLM(config)


def gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, **EOS))


def llama() -> hf.PreTrainedModel:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=2, **EOS))


def qwen3(window: int | None = None) -> hf.PreTrainedModel:
    sliding = {} if window is None else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    config = hf.Qwen3Config(**TEXT, num_key_value_heads=2, head_dim=8, **EOS, **sliding)
    return hf.Qwen3ForCausalLM(config)


def vit() -> hf.PreTrainedModel:
    return hf.ViTForImageClassification(hf.ViTConfig(**SIZES, image_size=16, patch_size=4, num_labels=3))


def bart() -> hf.PreTrainedModel:
    config = hf.BartConfig(
        vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def t5() -> hf.PreTrainedModel:
    config = hf.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=1,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


MODELS: dict[str, Callable[..., hf.PreTrainedModel]] = {
    f.__name__: f for f in (bert, roberta, modernbert, gpt2, llama, qwen3, vit, bart, t5)
}
CAUSAL = ("gpt2", "llama", "qwen3")
TWO_SIDED = ("bart", "t5")


def model_of(name: str, **options: int) -> hf.PreTrainedModel:
    """In evaluation, with weights large enough that attention is not uniform (T5's are), and norms that are not 1."""
    torch.manual_seed(0)
    model = MODELS[name](**options).eval()
    with torch.no_grad():
        for each, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            elif name != "t5":
                weight.mul_(3 if "embed" in each or "wte" in each else 8)
    return model


def tokens(batch: int = 2, length: int = 13) -> Tensor:
    return torch.randint(3, 60, (batch, length))


def padded(rows: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Sequences [length] as a batch, and its attention mask."""
    most = max(len(row) for row in rows)
    ids, mask = torch.zeros(len(rows), most, dtype=torch.long), torch.zeros(len(rows), most, dtype=torch.long)
    for i, row in enumerate(rows):
        where = slice(most - len(row), most) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    return ids, mask


def inputs(name: str, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """What a model is called with; positions count from the first valid token."""
    if name == "vit":
        return {"pixel_values": torch.randn(len(ids), 3, 16, 16)}
    given = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    if name in TWO_SIDED:
        return given | {"decoder_input_ids": torch.arange(3, 9).expand(len(ids), -1)}
    if mask is not None and name in ("bert", "gpt2", "llama", "qwen3", "modernbert"):
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return given


def logits(model: hf.PreTrainedModel, given: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**given).logits
