"""Texts that tokenizers trip over."""

from __future__ import annotations

import random

TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "  two spaces first",
    "a  b   c    d     ",
    "x\n\n\ny\n z\t\tq\r\n\r\n",
    "don't I'LL we've they'd'm",
    "1234 45.6 7a8b 0x1F ½ ² ٣٤ Ⅷ",
    "\n\n  1. one\n\n  22. two",
    "日本語テキスト、漢字かな交じり文。",
    "Привет, мир! Ελληνικά. עברית. مرحبا بالعالم",
    "ไทยภาษา हिन्दी தமிழ்",
    "🎉🎉👩‍👩‍👧‍👦 🇩🇪 é e\u0301 a\u0300\u0301",
    "def f(x):\n\treturn x+1  # comment\n\n\nclass A:\n    pass\n",
    '{"a": [1, 2.50, -3e10], "b": "\\u00e9"}',
    "https://example.org/a?b=c&d=%20#e",
    "café\u00a0naïve \u3000全角 \u2028line \u200bzero",
    "\x00\x01\x7f\x85\xff",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<bos>hi<eos> <start_of_turn>model\n",
    "<0x0A> [INST] </s>",
    "Ωmega ﬁ ℌ 𝐀𝐁 ǅ",
    "!?!?... -- ... ***",
    "word" * 50,
    "\U0010ffff\ue000",
]


def random_texts(count: int, seed: int, longest: int = 60) -> list[str]:
    noise = random.Random(seed)
    common = list("abcdefghijklmnopqrstuvwxyzABC     \n\n\t'.,!?-()<>_\"0123456789")
    rare = list("éüñßЖжשلا日本語🎉ก็\u00a0\u3000\x00½٣")
    return [
        "".join(
            noise.choice(common if noise.random() < 0.8 else rare) for _ in range(noise.randrange(1, longest))
        )
        for _ in range(count)
    ]
