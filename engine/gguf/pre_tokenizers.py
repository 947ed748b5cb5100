"""The pre-tokenizers of byte-pair vocabularies in GGUF files, by their names in `tokenizer.ggml.pre`.

A pre-tokenizer is a list of regular expressions. Each one splits the parts that the previous one leaves: matches and
the text between them become parts, and no merge of a byte pair crosses two of them. The expressions are those of the
original tokenizers. llama.cpp approximates the ones with \\p{Lu}, \\p{M} or \\p{Han}, which std::regex lacks.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_PREFIX = r"[^\r\n\p{L}\p{N}]?"
_WORD = rf"{_PREFIX}\p{{L}}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Words of mixed case are split before an upper-case letter that follows a lower-case one.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"{_PREFIX}{_UPPER}*{_LOWER}+|{_PREFIX}{_UPPER}+{_LOWER}*"
_CASED_CONTRACTED = rf"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
_NO_HAN = _CASED_CONTRACTED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
# Digits in groups of three, counted from the right.
_DIGIT_GROUPS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_SENTENCE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_LINES = r"[^\n]+|\n+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}"
_GPT4O = rf"{_CASED_CONTRACTED}|\p{{N}}{{1,3}}|{_SYMBOLS_SLASH}|{_SPACES}"
_DEEPSEEK3 = (r"\p{N}{1,3}", _HAN_KANA, rf"{_ASCII_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}")

# The cased letters of DeepSeek LLM.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN_SCRIPTS = (
    "\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-pair vocabulary splits text, and the defaults that its name implies.

    patterns       regular expressions of Oniguruma, applied in order
    ignore_merges  a part that is a token is not merged from its bytes
    add_bos        the BOS token precedes a text, unless the file has `tokenizer.ggml.add_bos_token`
    byte_level     tokens are spelled in the byte alphabet of GPT-2, not as text with U+2581 for spaces
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    byte_level: bool = True


# For files without a name, which is a fault of their converter.
DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_gpt2 = PreTokenizer((_GPT2,))
_single_digits = PreTokenizer((r"\p{N}", _GPT2))
_qwen2 = PreTokenizer((_QWEN2,))
_gpt4o = PreTokenizer((_GPT4O,))
_sentence = PreTokenizer((_SENTENCE,))
_deepseek3 = PreTokenizer(_DEEPSEEK3)
_gemma4 = PreTokenizer((_LINES,), add_bos=True, byte_level=False)
_tiny_aya = PreTokenizer((_DIGIT_GROUPS, _GPT4O))
_bailing = PreTokenizer(
    (rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_SYMBOLS}|\s*[\r\n]|\s+(?!\S)|\s+",)
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": DEFAULT,
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _llama3,
    ),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
            *("modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
            *("jina-v1-en", "jina-v2-code", "roberta-bpe"),
        ),
        _gpt2,
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _single_digits
    ),
    **dict.fromkeys(
        (
            *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open"),
            "grok-2",
        ),
        _qwen2,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), ignore_merges=True)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _gpt4o),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _tiny_aya),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _deepseek3),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _sentence),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _gemma4),
    "sarvam-moe": PreTokenizer((_LINES,), byte_level=False),
    "viking": PreTokenizer((_SENTENCE, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
    "spark2_5": PreTokenizer(
        (
            *_DEEPSEEK3[:2],
            rf"{_ASCII_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "youtu": PreTokenizer(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
            f"\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_HAN_KANA}",
            rf"{_CASED_CONTRACTED}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}",
        ),
        ignore_merges=True,
    ),
    "qwen35": PreTokenizer(
        (rf"{_CONTRACTION}|{_PREFIX}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)
    ),
    "tekken": PreTokenizer((rf"{_CASED_WORD}|\p{{N}}|{_SYMBOLS_SLASH}|{_SPACES}",), ignore_merges=True, add_bos=True),
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "kimi-k2": PreTokenizer((rf"\p{{Han}}+|{_NO_HAN}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",)),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "seed-coder": PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}",)),
    "afmoe": PreTokenizer((_DIGIT_GROUPS, f"[{_ASIAN_SCRIPTS}]+", _DEEPSEEK3[2])),
    "laguna": PreTokenizer((_LINES, _QWEN2)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|{_PREFIX}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"), ignore_merges=True
    ),
    "jais-2": PreTokenizer(
        (
            rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+"
            r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
            r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
}
