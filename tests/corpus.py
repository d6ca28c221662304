"""Texts that a model may write, none of which may change on its way to the client.

Only `struck` has a marker of an output format, and no text begins or ends with white space: line breaks beside markers
belong to the markers.
"""

from __future__ import annotations

PYTHON = '''\
class Queue:
    """First in, first out."""

    def __init__(self, limit: int = 8) -> None:
        self._items: list[int] = []
        self.limit = limit  # 0: none

    def push(self, item: int) -> bool:
        if self.limit and len(self._items) >= self.limit:
            return False
        for index, other in enumerate(self._items):
            if other > item:
                self._items.insert(index, item)
                break
        else:
            self._items.append(item)
        return True


print(Queue().push(3), f"{1 / 3:.2f}", r"\\d+\\s*", 0x1F, 1_000, lambda x: x ** 2)'''

C = """\
#include <stdio.h>

int main(int argc, char **argv)
{
\tfor (int i = 0; i < argc; ++i) {
\t\tif (argv[i][0] == '-' && argv[i][1] != '\\0')
\t\t\tprintf("%d:\\t%s\\n", i, argv[i] + 1);
\t}
\treturn argc > 1 ? 0 : ~0 & 0xff;
}"""

RUST = """\
impl<'a, T: Ord + ?Sized> Heap<'a, T> {
    pub fn peek(&self) -> Option<&'a T> {
        match self.items.first() {
            Some(&top) if !self.closed => Some(top),
            _ => None,
        }
    }
}"""

GO = """\
func (s *Server) Handle(w http.ResponseWriter, r *http.Request) {
\tselect {
\tcase job := <-s.jobs:
\t\tfmt.Fprintf(w, "%v\\n", job)
\tdefault:
\t\tw.WriteHeader(503)
\t}
}"""

JAVASCRIPT = """\
export const total = async (rows = []) => {
  const sums = rows.map(({ price, count }) => price * count);
  return `${sums.reduce((a, b) => a + b, 0).toFixed(2)} €`;
};
if (a <= b && c >= d || e !== f) { console.log(`x ?? y`, /^<\\/?[a-z]+>$/i); }"""

JAVA = """\
@Override
public int compareTo(Version other) {
    return Comparator.<Version>comparingInt(v -> v.major)
            .thenComparingInt(v -> v.minor)
            .compare(this, other);
}"""

SQL = """\
SELECT c.name, COUNT(*) AS n
  FROM customers c
  LEFT JOIN orders o ON o.customer_id = c.id AND o.total <> 0
 WHERE c.name LIKE 'O''Brien%'
 GROUP BY 1 HAVING COUNT(*) > 2; -- the best"""

SHELL = """\
set -euo pipefail
for f in "$@"; do
    [[ -f $f ]] || { echo "no $f" >&2; exit 1; }
    sed -e 's/\\t/    /g' < "$f" | awk '{ print $1 }' > "${f%.txt}.out" 2>&1
done"""

HASKELL = """\
fibs :: [Integer]
fibs = 0 : 1 : zipWith (+) fibs (tail fibs)

main :: IO ()
main = do
  let evens = [ x | x <- take 20 fibs, even x ]
  mapM_ (putStrLn . show) evens"""

YAML = """\
services:
  web:
    image: "nginx:1.27"
    ports:
      - 8080:80
    environment: &env
      KEY: 'it''s'
  worker:
    environment:
      <<: *env
      LIST: [a, b, c]"""

MAKEFILE = """\
all: build/app
build/%.o: src/%.c | build
\t$(CC) $(CFLAGS) -c -o $@ $<
.PHONY: all"""

HTML = """\
<!DOCTYPE html>
<html lang="en">
  <head><meta charset="utf-8"><title>Menu &amp; prices</title></head>
  <body>
    <h1>Menu</h1>
    <table><thead><tr><th>Dish</th><th>€</th></tr></thead>
      <tbody><tr><td>Soup</td><td><b>4</b>.<i>50</i></td></tr></tbody></table>
    <ul><li><a href="/a?b=1&amp;c=2">one</a></li><li><code>x &lt; y</code></li></ul>
    <blockquote><p><em>Fine</em>,<br/><strong>fresh</strong>.</p></blockquote>
    <img src="a.png" alt=""><hr><sub>1</sub><sup>2</sup><u>new</u>
    <h2>2</h2><h3>3</h3><h4>4</h4><h5>5</h5><h6>6</h6>
  </body>
</html>"""

MARKDOWN = """\
# Heading

1. First
   - nested *item* with `code`
   - **bold**, ~~gone~~, [link](https://example.org/a_b#c "title")

> A quotation
> of two lines

| a | b |
|---|:-:|
| 1 | 2 |

- [x] done
- [ ] open

![image](x.png)

---

Ends with a footnote[^1] and a line\\
break.

[^1]: Here."""

LATEX = r"""\begin{align*}
  \int_0^\infty e^{-x^2}\,\mathrm{d}x &= \frac{\sqrt{\pi}}{2} \\
  \sum_{k=1}^{n} k &= \binom{n+1}{2}, \quad \forall n \in \mathbb{N}
\end{align*}
Thus $a \neq b$ and \(x \to \infty\), 50\,\% of \textbf{all} \emph{cases}~\cite{knuth}."""

STRUCK = "<p>Was <s>old</s>, is new.</p>"  # also the end of a text in vocabularies of sentencepiece

PROSE = (
    "“Well,” she said – it was 9:30 a.m. – “that’s $1,234.56 (or 99.9%), isn't it?” He didn’t answer; we'll see... "
    "A/B, e.g. x@y.org, #5, C++ & C#, 2·3 ≤ 7 ≠ 8 ± 1, 20 °C, ½, №3, §4, «so», ‘so’, …and… so—on!"
)

SCRIPTS = {
    "german": "Größe schön, Füße über Äpfel; Übermaß, ÖL, ẞ und ß",
    "french": "L’été à Noël, ça coûte œuf, naïve, ÀÉÈÊÙÇ",
    "spanish": "¿Qué señor? ¡Año, pingüino, corazón!",
    "polish": "Zażółć gęślą jaźń, ŁÓDŹ",
    "czech": "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "turkish": "İstanbul'da ılık çay, ğüşöç",
    "vietnamese": "Tiếng Việt: Nguyễn ở Đà Nẵng, phở ngon quá",
    "icelandic": "Þórður á að fá ær, ðþæö",
    "latin_1": "À Á Â Ã Ä Å Æ Ç È É Ê Ë Ì Í Î Ï Ð Ñ Ò Ó Ô Õ Ö × Ø Ù Ú Û Ü Ý Þ ß à á â ã ä å æ ç õ ö ÷ ø ù ú û ü ý þ ÿ",
    "greek": "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία, Ώρα",
    "russian": "Съешь ещё этих мягких французских булок, да выпей чаю",
    "ukrainian": "Ґанок, їжак, єдність, Київ",
    "hebrew": "שלום עולם, מה שלומך? 123",
    "arabic": "السلام عليكم، كيف الحال؟ ١٢٣",
    "persian": "می‌خواهم گچ پژ",
    "urdu": "ٹھیک ہے، یہ ڈبہ ہے",
    "hindi": "नमस्ते दुनिया, क्षत्रिय ज्ञान १२३",
    "bengali": "আমার সোনার বাংলা",
    "tamil": "தமிழ் மொழி",
    "telugu": "తెలుగు భాష",
    "thai": "สวัสดีชาวโลก น้ำ ก็",
    "khmer": "សួស្តី\u200bពិភពលោក",
    "burmese": "မင်္ဂလာပါ",
    "tibetan": "བཀྲ་ཤིས་བདེ་ལེགས།",
    "georgian": "გამარჯობა მსოფლიო",
    "armenian": "Բարեւ աշխարհ",
    "amharic": "ሰላም ልዑል",
    "chinese": "你好，世界！《三体》——“龘”靐，繁體字與標點。",
    "japanese": "こんにちは、世界。カタカナ・漢字「々〆」ー～ｶﾅ",
    "korean": "안녕하세요, 세계! ㅋㅋ 뷁",
    "mathematics": "∀x∈ℝ: ∃y ≥ x², 𝒜 ⊆ 𝔹 ⇒ ⌊x⌋ ∑∏∫√∂ ⟨a|b⟩ ≈ ∞",
    "rare_planes": "𐍈 𓀀 𝄞 𠮷野家 🀄",
}

EMOJI = "😀 👍🏽 ❤️ 👩‍👩‍👧‍👦 🏳️‍🌈 👨🏿‍💻 🇩🇪🇯🇵🇺🇳 1️⃣ ☑️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿 ✨🚀✅❌⚠️ ⭐️ ʕ•ᴥ•ʔ ¯\\_(ツ)_/¯ ┌─┐│█░ →←↔ ①②"

SPACES = (
    "a"
    + "".join(" " * n + "b" for n in (1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 23, 24, 31, 32, 33, 48, 63, 64, 65, 80))
    + "."
)
NEWLINES = "a" + "".join("\n" * n + "b" for n in (1, 2, 3, 4, 5, 8, 11, 15, 16, 17, 24, 31, 32, 33)) + "."
TABS = "a" + "".join("\t" * n + "b" for n in (1, 2, 3, 4, 5, 8, 12, 16, 20)) + "."
MIXED_WHITE = (
    "a \n b\n \nc \t d\t \te\n\t\tf\n    \n        g \r\nh\r\n\r\ni\rj "
    "\u00a0k\u2003l\u3000m\u200bn\u2028o\u2029p\u0085q\x0cr\x0bs."
)
CONTROLS = "a\x00b\x01c\x07d\x08e\x1bf\x1fg\x7fh\x80i\ufeffj\ufffdk\u200dl\u202em\u00adn"
DIGITS = "0 1 12 123 1234 12345 3.14159 1e-10 0b1010 192.168.0.1 2026-11-18T02:18:43Z +49 (0)30 ١٢ ①"
REPEATED = "=" * 40 + "-" * 33 + "#" * 20 + "*" * 17 + "_" * 50 + "." * 30 + "ha" * 20 + "!" * 9

CODE = {
    "python": PYTHON,
    "c": C,
    "rust": RUST,
    "go": GO,
    "javascript": JAVASCRIPT,
    "java": JAVA,
    "sql": SQL,
    "shell": SHELL,
    "haskell": HASKELL,
    "yaml": YAML,
    "makefile": MAKEFILE,
}
CORPUS: dict[str, str] = {
    **CODE,
    "html": HTML,
    "struck": STRUCK,
    "markdown": MARKDOWN,
    "latex": LATEX,
    "prose": PROSE,
    **SCRIPTS,
    "emoji": EMOJI,
    "spaces": SPACES,
    "newlines": NEWLINES,
    "tabs": TABS,
    "mixed_white": MIXED_WHITE,
    "controls": CONTROLS,
    "digits": DIGITS,
    "repeated": REPEATED,
}
