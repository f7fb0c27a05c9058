"""How text is cut before byte-pair merging: one row per `tokenizer.ggml.pre`, as data.

Each row holds regular expressions (Oniguruma syntax) applied one after another: a piece that
matches stands alone, and so does what lies between two matches.  Merges never cross a cut.
Where llama.cpp's reading of an expression differs from the original tokenizer's (cased letters
outside ASCII, white space inside a class) the row follows llama.cpp, so that ids agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """The cuts of one family and the defaults that go with its name.

    patterns       expressions applied in turn
    ignore_merges  a whole piece that is a token is taken as it is, whatever the merges say
    add_bos        put BOS first unless the file says otherwise
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _class(ranges: str) -> str:
    """The inside of a character class from 'hex hex-hex ...'."""
    parts = (part.partition("-") for part in ranges.split())
    return "".join(rf"\x{{{a}}}" + (rf"-\x{{{b}}}" if dash else "") for a, dash, b in parts)


_CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTION_ANY_CASE = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_NEWLINES_THEN_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = rf"{_CONTRACTION}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_BLOOM = rf" ?[^(\s|.,!?{_class('2026 3002 FF0C 3001 964 6D4 60C')})]+"


def _words(number: str, contraction: str = f"{_CONTRACTION_ANY_CASE}|") -> str:
    """The shape the llama 3 and Qwen families share; `number` is how many digits stay together."""
    return (
        rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{number}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_NEWLINES_THEN_SPACES}"
    )


def _o200k(number: str, contraction: str) -> str:
    """Words that end where lower case turns into upper; ASCII letters only have case here."""
    upper, lower = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
    symbol = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{symbol}{upper}*{lower}+{contraction}|{symbol}{upper}+{lower}*{contraction}"
        rf"|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_NEWLINES_THEN_SPACES}"
    )


_LLAMA3 = _words(r"\p{N}{1,3}")
_QWEN2 = _words(r"\p{N}")
_QWEN35 = (
    rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_NEWLINES_THEN_SPACES}"
)
_GPT4O = _o200k(r"\p{N}{1,3}", f"(?:{_CONTRACTION_ANY_CASE})?")
_TEKKEN = _o200k(r"\p{N}", "")

# DeepSeek's list of cased letters, from its published tokenizer configuration.
_CASED = _class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 "
    "388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA "
    "1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 "
    "1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB "
    "1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D "
    "212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 "
    "A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
    "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_EAST_ASIAN = rf"[{_class('4E00-9FA5 800-4E00 AC00-D7FF')}&&\S]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    rf"\s?[!-/:-~{_class('FF01-FF0F FF1A-FF5E 2018-201F 3001-3002')}]+",
    r"\s+\z",
    _EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_KANA_AND_HAN = rf"[{_class('4E00-9FA5 3040-309F 30A0-30FF')}]+"
_ASCII_SYMBOL_WORD = r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _KANA_AND_HAN,
    rf"{_ASCII_SYMBOL_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_NEWLINES_THEN_SPACES}",
)
_SPARK = (
    r"\p{N}{1,3}",
    _KANA_AND_HAN,
    rf"{_ASCII_SYMBOL_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
    r"\p{N}",
)
_HAN = _class(
    "4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF 2CEB0-2EBEF "
    "F900-FAFF 2F800-2FA1F"
)
_KIMI_K2 = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+(?:{_CONTRACTION_ANY_CASE})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_NEWLINES_THEN_SPACES}"
)
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = (
    rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_NEWLINES_THEN_SPACES}"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


def _rows() -> Iterator[tuple[str, PreTokenizer]]:
    """(names, row) of every family."""
    yield "default", PreTokenizer(_DEFAULT)
    yield (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
        PreTokenizer((_GPT2,)),
    )
    yield (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    )
    yield (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    )
    yield "dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))
    yield "glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)
    yield (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    )
    yield "qwen35", PreTokenizer((_QWEN35,))
    yield "ufakzeka", PreTokenizer((_words(r"\p{N}", contraction=""),))
    yield "minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignore_merges=True)
    yield "laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))
    yield "deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)
    yield "deepseek-coder", PreTokenizer(_DEEPSEEK_CODER)
    yield "deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(_DEEPSEEK_V3)
    yield "spark2_5", PreTokenizer(_SPARK)
    yield "falcon", PreTokenizer(_FALCON)
    yield "gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))
    yield "tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)
    yield "kimi-k2", PreTokenizer((_KIMI_K2,))
    yield "bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))
    yield "seed-coder", PreTokenizer((_SEED_CODER,))
    yield "exaone-moe", PreTokenizer((_EXAONE_MOE,))
    yield "poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))
    yield "viking", PreTokenizer((_BLOOM, r"\p{N}"))


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    name: row for names, row in _rows() for name in names.split()
}
