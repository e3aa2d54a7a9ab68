"""A byte-pair tokenizer made on the spot: it merges "hel" + "lo", and has chat tokens and a template."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def make_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, and the merges h+e, he+l, l+o, hel+lo."""
    merges = [("h", "e"), ("he", "l"), ("l", "o"), ("hel", "lo")]
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=chat_template,
    )
    return tokenizer
