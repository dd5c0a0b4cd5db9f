"""Provide texts for comparing tokenizers, including various scripts, numbers, spaces, code and special
tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

# One line each of what cuts words, joins letters or counts digits differently somewhere. No text is from a
# book: what counts is which characters meet.
_TEXTS = (
    "",
    " ",
    "a",
    "To be, or not to be.",
    " begins with a blank",
    "ends with a blank ",
    "two  blanks,   three,     five,         nine",
    "a\ttab,\t\ttwo\nline\n\nempty line\r\nof Windows\r\r\n \n  \n\t\n",
    "\n",
    "\n\n  x",
    "it's we'll I'd you're they've I'm 'tis IT'S WE'LL I'D YOU'RE",
    "1 22 333 4444 55555 1234567890 3.14159 1,000,000 1e-5 0x1F 12:30 2024-02-29 ½ ² ٣ ४ 三",
    "1 2 3  4   5",
    "camelCase snake_case CamelHTTPServer x2y3 I18N iOS17",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ ... --- ### $$$ !!! ?!",
    "def f(x):\n    if x > 0:\n        return [x**2 for _ in range(3)]  # done\n\treturn {'a': 1}\n",
    '<p class="x">a &amp; b</p> {"key": [1, 2.5, null]} https://example.org/a?b=c#d user@example.org',
    "< s >, </ s>, <|, |>, [ INST ], <unk , ▁, ▁▁a, Ġ, Ċ, Â",
    "naïve café Straße fiancée smörgåsbord dnia łódź žluťoučký İstanbul ıI ŒUVRE ﬁ ﬂ",
    "e\u0301 e\u0308\u0323 a\u030a ñ n\u0303",
    "Ελληνικά Русский язык Українська ქართული Հայերեն",
    "עִבְרִית العربية فارسی اردو 123 عربي",
    "हिन्दी বাংলা தமிழ் తెలుగు ภาษาไทย မြန်မာ ខ្មែរ བོད་ཡིག አማርኛ",
    "中文，没有空格。数字123和English混排。 日本語のひらがな、カタカナ ｶﾅ 한국어 조선말 ㄱㄴㄷ 𠮷 龘",
    "Tiếng Việt Türkçe Íslenska Yorùbá ʻŌlelo Hawaiʻi",
    "😀 👍🏽 👩‍👩‍👧‍👦 🇩🇪🇯🇵 ❤️ ☃ ✓ → ∑∫√∞ ≠ ≤ € £ ¥ ₹ ° µ § © ™",
    "“quotes” ‘single’ «guillemets» „low“ – — … • 　 wide　blank",
    "no\u00a0break\u2009thin\u200bzero\u200djoin\u2060word\ufeffmark\u202eturn\u2028line\u0085next",
    "\x00 \x01\x02 \x1b[0m \x7f \ufffd \uffff \U0010ffff",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "word " * 3000,  # longer than what a file may have been told to cut off
)


def texts(special_tokens: Iterable[str]) -> Iterator[str]:
    """Yield the texts for comparing tokenizers.

    Each special token occurs alone, repeated, and inside and between words.
    """
    yield from _TEXTS
    tokens = sorted(set(special_tokens))
    for token in tokens:
        yield token
        yield f"{token}hi{token}"
        yield f"a{token}{token}b {token} c\n{token}\n 12{token}34  {token}  ."
        yield token[:-1]
        yield token.swapcase()
    yield "".join(tokens)
    yield " ".join(tokens)
