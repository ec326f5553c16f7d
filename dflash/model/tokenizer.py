"""The target's own tokenizer, loaded and checked; and which of its tokens text can contain.

Not for: applying the chat template to prompts (`dflash.data`).
"""

from typing import Any

from dflash.errors import ConfigurationError
from dflash.model.source import model_folder

_CONVERSATION = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "c"},
    {"role": "user", "content": "d"},
]


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """The tokenizer of a hub id or folder; ConfigurationError when absent or without a chat template."""
    from transformers import AutoTokenizer

    folder = model_folder(model, revision, weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"target.model: no tokenizer can be loaded from {folder} ({_first_line(error)}); "
            "give a model folder with tokenizer.json"
        ) from error
    if not tokenizer.chat_template:
        raise ConfigurationError(
            f"target.model: the tokenizer in {folder} has no chat template; "
            "use an instruction-tuned model, or add chat_template.jinja"
        )
    return tokenizer


def token_in_use(tokenizer: Any, token: int) -> str | None:
    """Why `token` can occur in text, as a phrase; None when it cannot.

    Rows beyond the tokenizer never occur. A special token occurs when it is a named one (begin,
    end, padding, ...) or the chat template writes it; its mask token is there to be used. Any
    other token of the tokenizer is ordinary text.
    """
    if token >= len(tokenizer) or token == tokenizer.mask_token_id:
        return None
    text = tokenizer.convert_ids_to_tokens(token)
    added = tokenizer.added_tokens_decoder.get(token)
    if added is None or not added.special:
        return f"is {text!r}, an ordinary token"
    named = {k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)}
    role = next((k for k, v in named.items() if v == text), None)
    if role is not None:
        return f"is {text!r}, the tokenizer's {role}"
    if _template_writes(tokenizer, token, str(text)):
        return f"is {text!r}, which the chat template writes"
    return None


def _template_writes(tokenizer: Any, token: int, text: str) -> bool:
    template = tokenizer.chat_template
    sources = template.values() if isinstance(template, dict) else [template or ""]
    if any(text in source for source in sources):
        return True
    if not template:
        return False
    from jinja2.exceptions import TemplateError

    try:
        ids = tokenizer.apply_chat_template(_CONVERSATION, add_generation_prompt=True, return_dict=False)
    except (TemplateError, ValueError, TypeError):
        return False  # templates that refuse this conversation were read as text above
    return token in ids


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
