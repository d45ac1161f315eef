"""Texts that try to be executed, to leave their place, or to make readers see something else."""

from __future__ import annotations

MARKUP = (
    "<script>window.owned=1</script>",
    "<img src=x onerror=window.owned=2>",
    "<svg/onload=window.owned=3>",
    "\"><b onmouseover='window.owned=4' style=position:fixed;inset:0>",
    "'-alert(5)-'",
    "</title></style></script><script>window.owned=6</script>",
    "<a href=javascript:window.owned=7>x</a>",
    "<iframe srcdoc='<script>parent.owned=8</script>'>",
    "<link rel=stylesheet href=http://elsewhere.invalid/c.css>",
    "<meta http-equiv=refresh content='0;url=http://elsewhere.invalid'>",
    "<style>*{background:url(http://elsewhere.invalid/s)}</style>",
    "<form action=http://elsewhere.invalid><button>go",
    "{{7*7}}{%print(1)%}${7*7}",
    "-->]]><!--",
    "&lt;b&gt;&amp;#x3c;",
    "javascript:window.owned=9",
    "data:text/html,<script>window.owned=10</script>",
)
UNSEEN = (
    "\x00\x01\x07\x1b[31mred\x7f\x9b",
    "\u202egpj.exe\u2066\u2069\u200f",
    "\u2028\u2029\ufeff\u00ad\u200b",
    "e" + "\u0301" * 60,
    "\U000e0041\U000e0042",
)
SEEN = (
    "👩🏽\u200d🚀🏴\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "שלום עולם",
    "مرحبا",
    "日本語",
    "ﷺ",
    "a" * 3000,
)
HOSTILE = (*MARKUP, *UNSEEN, *SEEN)
