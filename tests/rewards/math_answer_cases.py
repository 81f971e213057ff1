"""What math_answer says about 100 completions: (completion, reference, accuracy, format, reason)."""

CASES: list[tuple[str, object, int, int, str]] = [
    # After ####, as GSM8K marks its answers.
    ("6 * 7 = 42\n#### 42", "42", 1, 1, "the marked number"),
    ("#### 42", "6 * 7 = <<6*7=42>>42\n#### 42", 1, 1, "the reference is a solution that marks its answer"),
    ("#### 42", 42, 1, 1, "the reference is an integer of JSON"),
    ("#### 42.0", "42", 1, 1, "numbers are compared by value"),
    ("#### 42.\n", "42", 1, 1, "a period and a line end are no part of it"),
    ("#### $1,234,567.50", "1234567.5", 1, 1, "currency and thousands"),
    ("#### -$5", "-5", 1, 1, "the sign before the currency"),
    ("#### $-5", "-5", 1, 1, "the sign after it"),
    ("#### €20", "20", 1, 1, "another currency"),
    ("#### 42 fluid ounces.", "42", 1, 1, "units of a number are not compared"),
    ("#### 10 km/h", "10", 1, 1, "a unit with a slash"),
    ("#### 3/4", "0.75", 1, 1, "a fraction"),
    ("#### 1,800", "1800", 1, 1, "thousands"),
    ("#### 5e3", "5000", 1, 1, "an exponent"),
    ("#### .5", "1/2", 1, 1, "no digit before the point"),
    ("#### −3", "-3", 1, 1, "the minus sign of Unicode"),
    ("#### 41", "42", 0, 1, "another number"),
    ("#### 4.2", "42", 0, 1, "another value of the same digits"),
    ("#### -42", "42", 0, 1, "another sign"),
    ("#### 42000", "42", 0, 1, "a number that begins with the reference"),
    ("#### 7/0", "7", 0, 0, "no number"),
    ("#### 5 or 6", "5", 0, 0, "two numbers are no answer"),
    ("####", "5", 0, 0, "nothing marked"),
    # Percent.
    ("#### 50%", "50", 1, 1, "a percentage may be meant as its number"),
    ("#### 0.5", "50%", 1, 1, "or as the fraction that it is"),
    (r"\boxed{50\%}", "0.5", 1, 1, "with LaTeX's backslash"),
    (r"\boxed{\frac{1}{2}}", r"50\%", 1, 1, "a fraction for a percentage"),
    ("#### 5000", "50", 0, 1, "no percent sign, no factor of 100"),
    # In a box, and what stands around it.
    (r"so \boxed{42}.", "42", 1, 1, "a period after the box"),
    (r"so $\boxed{42}$", "42", 1, 1, "the box in dollars"),
    (r"so \(\boxed{42}\).", "42", 1, 1, "the box in parentheses of LaTeX"),
    (r"\boxed{42} minutes.", "42", 1, 0, "right, and a unit after the box is only bad format"),
    (r"\boxed{42} I think", "42", 1, 0, "right, with words after it"),
    ("so \\boxed{42}\nas we saw.", "42", 1, 0, "right, with a line after it"),
    (r"\boxed{41}, no: \boxed{42}", "42", 1, 0, "the last box counts"),
    (r"\boxed{42}, no: \boxed{41}", "42", 0, 0, "an earlier box does not"),
    (r"\boxed{41} #### 42", "42", 1, 0, "the last of two kinds of marks"),
    ("#### 42\nor so", "42", 1, 0, "a line after ####"),
    ("#### 41\n#### 42", "42", 1, 0, "the last of two lines"),
    ("\\boxed{42}\n#### Check\n6 * 7 is 42 too", "42", 1, 0, "a heading of Markdown after the box"),
    (r"\boxed{42", "42", 0, 0, "a box that never closes"),
    (r"\boxed{}", "42", 0, 0, "an empty box"),
    # Without a mark, by the field's phrase.
    ("The answer is 42.", "42", 1, 0, "a spoken answer"),
    ("The final answer is: 42", "42", 1, 0, "with a colon"),
    ("Answer: 42", "42", 1, 0, "with a colon alone"),
    ("The answer is **42**.", "42", 1, 0, "in bold"),
    ("the answer is 42 because 6 * 7 = 42", "42", 1, 0, "before its reason"),
    (r"The answer is $\frac{1}{2}$.", "0.5", 1, 0, "a formula"),
    ("The answer is (B).", "B", 1, 0, "a letter"),
    ("The answer is 3.5 hours. Or 210 minutes.", "3.5", 1, 0, "a sentence ends at a period before a space"),
    ("The answer is 41.\nThe answer is 42.", "42", 1, 0, "the last of two"),
    (r"\boxed{42}. So the answer is right.", "42", 1, 0, "a box is the stronger mark"),
    ("The answer is 41. 42", "42", 0, 0, "what follows the sentence is not marked"),
    ("6 * 7 = 42", "42", 0, 0, "no mark: lenient only"),
    ("", "42", 0, 0, "nothing at all"),
    # Multiple choice.
    (r"\boxed{B}", "B", 1, 1, "the letter"),
    (r"\boxed{b}", "B", 1, 1, "in lower case"),
    (r"\boxed{\text{B}}", "B", 1, 1, "as text"),
    (r"\boxed{\textbf{(B)}}", "B", 1, 1, "bold, in parentheses"),
    (r"\boxed{(B)}", "(B)", 1, 1, "both in parentheses"),
    (r"\boxed{B.}", "B", 1, 1, "with a period"),
    (r"\boxed{B) 42}", "B", 1, 1, "with what it stands for"),
    (r"\boxed{(B) \frac{1}{2}}", "B", 1, 1, "with a formula"),
    ("#### B", "B", 1, 0, "after ####, whose format is a number"),
    (r"\boxed{C}", "B", 0, 1, "another letter"),
    (r"\boxed{Berlin}", "B", 0, 1, "a word is no letter"),
    (r"\boxed{2}", "B", 0, 1, "a number is no letter"),
    # Words.
    (r"\boxed{\text{Monday}}", "Monday", 1, 1, "LaTeX's wrapper is not compared"),
    (r"\boxed{monday}", "Monday", 1, 1, "nor is case"),
    (r"\boxed{\text{even}}", r"\text{even}", 1, 1, "both wrapped"),
    (r"\boxed{Yes.}", "yes", 1, 1, "nor a period"),
    (r"\boxed{\text{New York}}", "New York", 1, 1, "two words"),
    (r"\boxed{\text{Tuesday}}", "Monday", 0, 1, "another word"),
    (r"\boxed{forty-two}", "42", 0, 1, "numbers are written in digits"),
    # Units and numbers in LaTeX.
    (r"\boxed{1{,}234\text{ cm}}", "1234", 1, 1, "LaTeX's thousands, a unit as text"),
    (r"\boxed{5 \mathrm{~cm}}", "5", 1, 1, "an upright unit"),
    (r"\boxed{5\,\text{cm}^2}", "5", 1, 1, "a squared unit"),
    (r"\boxed{30^\circ}", "30", 1, 1, "degrees"),
    (r"\boxed{\$18.90}", "18.9", 1, 1, "dollars"),
    (r"\boxed{\text{5 apples}}", "5", 1, 1, "number and unit as text"),
    (r"\boxed{5 \times 10^3}", "5000", 1, 1, "scientific notation"),
    # Expressions.
    (r"\boxed{\frac{1}{2}}", r"thus \boxed{\frac{2}{4}}", 1, 1, "equal fractions"),
    (r"\boxed{\frac12}", "0.5", 1, 1, "without braces"),
    (r"\boxed{1\frac{1}{2}}", "1.5", 1, 1, "a mixed number"),
    (r"\boxed{-\dfrac{3}{4}}", "-0.75", 1, 1, "a display fraction"),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1, 1, "roots"),
    (r"\boxed{x^2 + 1}", "1 + x^2", 1, 1, "the order of a sum"),
    (r"\boxed{x = 5}", "5", 1, 1, "the value of a variable"),
    (r"\boxed{\pm 3}", "3, -3", 1, 1, "two values"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1, 1, "a matrix"),
    (r"\boxed{\frac{1}{3}}", "0.5", 0, 1, "another fraction"),
    (r"\boxed{0.333}", r"\frac{1}{3}", 0, 1, "a rounded value is another one"),
    (r"\boxed{3\pi}", "9.42", 0, 1, "here too"),
    # Intervals, sets, tuples.
    (r"\boxed{[0, 1)}", "[0,1)", 1, 1, "an interval"),
    (r"\boxed{x \in [0,1]}", "[0,1]", 1, 1, "as a statement"),
    (r"\boxed{(-\infty,1]\cup[2,3)}", r"(-\infty, 1] \cup [2, 3)", 1, 1, "a union"),
    (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1, 1, "sets have no order"),
    (r"\boxed{(0, 1)}", "[0,1)", 0, 1, "another end of the interval"),
    (r"\boxed{(-\infty,1]\cup[2,3]}", r"(-\infty, 1] \cup [2, 3)", 0, 1, "of a union"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2, 3\}", 0, 1, "a smaller set"),
    (r"\boxed{(1, 2)}", "(2, 1)", 0, 1, "tuples have an order"),
]

# What is in the box, the reference, and whether they are equal.
BOXED: dict[str, list[tuple[str, str, int]]] = {
    "a letter after a number is a variable": [
        *[("6n", "6m", 0), ("3i", "3", 0), ("-4i", "-4", 0), ("8y", "8", 0), ("9ab", "9cd", 0), ("1/3x", "1/3y", 0)],
        *[("6m", "6m", 1), ("7 cm", "7", 1), (r"5\text{ m}", "5", 1), ("12 m/s", "12", 1), ("9 ft.", "9", 1)],
    ],
    "a word after a number may change it": [
        *[("5 and six", "5", 0), ("4 or y", "4", 0), ("2 million", "2", 0), ("7 p.m.", "7 a.m.", 0), ("8 pm", "8", 0)],
        *[("6 dozen", "6", 0), ("6 thirds", "6", 0), ("6 plus zero", "6", 0), ("3万", "3", 0), ("5个", "5", 1)],
        *[("42 fluid ounces", "42", 1), ("3 bags of rice", "3", 1), ("4 km", "4 cm", 0), ("4 cm", "4 cm", 1)],
    ],
    "one thing in another spelling": [
        *[(r"9.8\,\frac{\mathrm{m}}{\mathrm{s}^2}", r"9.8\text{ m/s}^2", 1)],
        *[("4^{th}", "4", 1), (r"4\text{th}", "4", 1), ("1.2 x 10^3", "1200", 1), ("1.2x", "1.2", 0)],
        *[
            ("x ≡ 3 (mod 7)", rf"x \equiv 3{mod}", 1)
            for mod in (r"\pmod 7", r"\pmod{7}", r" \mod 7", r"\ (\mathrm{mod}\ 7)")
        ],
        *[("x ≡ 3 (mod 7)", r"x \equiv 3 \pmod{17}", 0), ("x ≡ 3 (mod 7)", r"x \equiv 3", 0)],
        ("7 mod 3", "7 mod 4", 0),
        *[
            (
                r"\left(\begin{array}{c}1\\2\end{array}\right)",
                rf"\begin{{pmatrix}}1{row}2\end{{pmatrix}}",
                int(row != "&"),
            )
            for row in (r"\\", "&")
        ],
        *[(r"\mathcal{O}(n)", "O(n)", 1), (r"A^\top", "A^T", 1), ("ℕ", r"\mathbb{N}", 1), ("ℕ", "N", 0), ("ℕ", "ℤ", 0)],
        *[(r"x\in(1,2)", "1<x<2", 1), (r"x\in(1,2)", "(1,2)", 1), (r"x\in(1,2)", r"1<x\le 2", 0), ("A,C,D", "ACD", 1)],
        *[("ABD", "A, B, D", 1), ("ABD", "A, B, C", 0), ("A and C, D", "ACD", 1), ("(a,b)", "(b,a)", 0)],
        *[(r"x=1 \text{ or } x=3", "1,3", 1), (r"y=x \text{ or } y=2", r"y=2 \text{ or } y=x", 1)],
        *[("1 or 2", "2, 1", 1), (r"x=1 \text{ and } y=2", "(1,2)", 1)],
        (r"x=1 \text{ or } y=2", r"x=1 \text{ and } y=2", 0),
    ],
    "what is left to calculate is not the number": [
        *[(item, "6", 0) for item in ("2+4", "8-2", r"2\cdot3", r"2 \times 3", "2*3", "3!", r"\sqrt{36}", "12/2/1")],
        *[
            (item, "6", 0)
            for item in ("2(3)", "--6", r"\frac{2+4}{1}", "|6|", r"\binom{4}{2}", "6e", "6 mod 7", "6:00")
        ],
        *[
            (item, "6", 0)
            for item in ("x=2+4", "2+4 = x", "x > 6", "6, 7", r"x = 6 \text{ or } x = 7", r"\pm 6", "6...")
        ],
        *[(item, "6", 1) for item in ("x = 6", "6 = x", "f(2) = 6", "6.", "(6)", "$6$", r"\frac{12}{2}", "6^1", "+6")],
        *[("4+1", "x = 5", 0), ("5", "x = 5", 1), ("y = 5", "x = 5", 0), ("25", "x^2+y^2=25", 0), ("6", "3!", 1)],
        *[("(1+1, 3)", "(2,3)", 0), (r"\{1+1,3\}", r"\{2,3\}", 0), ("(2, 3)", "(2,3)", 1), ("1200", "(1,200)", 0)],
        *[(r"2+\sqrt{3}", r"2+\sqrt{3}", 1), (r"5+2\sqrt{6}", r"(\sqrt{2}+\sqrt{3})^2", 1), ("2π", r"2\pi", 1)],
    ],
    "one choice and no other": [
        *[(item, "A", 0) for item in ("A. B. C. D", "(A) (B)", "A or B", "A, B", "A/B", "A B", "A.B.C", "A: B")],
        *[(item, "A", 0) for item in ("a. none b. all", "A. x=1 or B. x=2", "A) or C", "A A", "(A), (B)")],
        *[("B) 42", "B", 1), (r"(B) \frac{1}{2}", "B", 1), ("A) vitamin C.", "A", 1), ("(D) Both A and B", "D", 1)],
    ],
    "numbers near zero differ": [
        *[("1/2^98", "1/2^99", 0), (r"e^{-70}", "e^{-80}", 0), (r"e^{-5000}", "e^{-6000}", 0)],
        *[(r"2 \times 10^{-30}", r"3 \times 10^{-28}", 0), (r"\{e^{-70}, 1\}", r"\{e^{-80}, 1\}", 0)],
        *[(r"2^{-99}", r"\frac{1}{2^{99}}", 1), ("1/2^99", r"2^{-99}", 1)],
    ],
    "a rounded value is another one": [
        *[("0.333333", "1/3", 0), ("1.414214", r"\sqrt{2}", 0), ("3.14159265", r"\pi", 0)],
        *[(r"3.14159\ldots", r"\pi", 0), (r"2.5\pi", r"\frac{5\pi}{2}", 1), (r"0.1\pi", r"\frac{\pi}{10}", 1)],
        (r"0.\overline{3}", r"\frac13", 1),
    ],
    "an ellipsis is equal to itself alone": [
        *[(r"2, 4, \ldots, 2n", r"2, 3, \ldots, n", 0), (r"1, 2, \dots", r"1, 2, 3, \dots", 0)],
        (r"2, 4, \ldots, 2n", r"2, 4, \ldots, 2n", 1),
    ],
    "forms of the same number": [
        *[("1 1/2", "1.5", 1), ("11 5/6", "71/6", 1), (r"12\frac12\%", r"12.5\%", 1), ("-2 1/4", "-2.25", 1)],
        *[("3 000", "3000", 1), ("3\u202f000", "3000", 1), (r"3\,000", "3000", 1), ("2 2/3", "2", 0)],
        *[("1 5/3", "8/3", 0), ("2**10", "1024", 1), (r"\left(\frac{1}{2}\right)^{3}", "0.125", 1)],
        *[("1.024 × 10³", "1024", 1), ("50 percent", "0.5", 1), ("5€", "5", 1), ("30°", "30", 1), ("007", "7", 1)],
        ("3/-4", "-0.75", 1),
    ],
    "characters of other keyboards": [
        *[(item, "-5", 1) for item in ("–5", "－5", "−5", "‑5", "—5", "﹣5")],
        *[("５", "5", 1), ("5。", "5", 1), ("（1，2）", "(1,2)", 1), ("1½", "1.5", 1), ("x²", "x^2", 1)],
        *[("√2", r"\sqrt2", 1), ("￥５", "5", 1), ("１，０００", "1000", 1), ("10⁻³", "0.001", 1)],
    ],
    "words and variables are compared as they are": [
        *[("listen", "silent", 0), ("York New", "New York", 0), ("AB", "ab", 0), ("x", "X", 0), ("ba", "ab", 1)],
        *[("No", "no", 1), ("1010_3", "1010_2", 0), (r"2\sqrt{3}\text{ cm}", r"2\sqrt{3}", 1)],
    ],
    "an inequality is an interval": [
        *[("0<x<12.5", "(0,12.5)", 1), ("(0,12.5)", "0<x<12.5", 1), ("x>1", r"(1,\infty)", 1), ("0<x<2", "[0,2]", 0)],
        (r"x < \infty", r"x < +\infty", 1),
    ],
    "what differs in a symbol differs": [
        *[(r"\triangle ABC", r"\triangle DEF", 0), (r"\triangle", r"\triangle ABC", 0)],
        *[(r"\square PQRS", r"\square PQRT", 0), (r"\angle XYZ", r"\angle YXZ", 0)],
        *[(r"\overrightarrow{AB}", r"\overrightarrow{BA}", 0), ("AB-BA", "0", 0), ("f''(x)", "f'(x)", 0)],
        *[("y", "y'", 0), (r"A^\top B", "AB", 0), ("MN^T", "N^TM", 0), (r"A^{-1}B", "BA^{-1}", 0)],
        *[(r"\nabla\cdot F", r"\nabla\times F", 0), (r"\frac{df}{dx}", r"\frac{df}{dy}", 0)],
        *[(r"\frac{dy}{dx}", r"\frac yx", 0), (r"\vec a\times\vec b", r"\vec b\times\vec a", 0)],
        *[(r"A\times B", r"B\times A", 0), (r"\bar z", "z", 0), ("z^*", "z", 0), ("CH_2ClBr", "CH_2BrCl", 0)],
        *[("CO", "Co", 0), (r"\ce{SO4^2-}", r"\ce{SO3^2-}", 0), ("[0,1]", r"[0,\infty]", 0)],
        *[("(1 2)(3 4)", "(1 3)(2 4)", 0), (r"p\Rightarrow q", r"q\Rightarrow p", 0), (r"5\mid n", r"5\nmid n", 0)],
        *[(r"\sin 30^\circ", r"\sin 30", 0), (r"\Gamma(n)", r"\gamma(n)", 0), ("x^2+C", "x^2+c", 0), ("~p", "p", 0)],
        *[(r"2^{1000}+\sqrt2", r"2^{1000}+\sqrt3", 0), ("|z|", "z", 0), (r"\lfloor x\rfloor", "x", 0)],
        ("x/2y", "xy/2", 0),
    ],
    "dates, scores and times are no differences": [
        *[("2024-01-05", "2024-05-01", 0), ("2016", "2023-03-04", 0), ("3-1", "4-2", 0), ("6", "21 - 15", 0)],
        *[("10:20", "12:24", 0), ("9:15 a.m.", "9:15 AM", 1), (r"9{:}15", "9:15", 1), ("10:4", "5:2", 1)],
        *[("1:2:3", "1:3:2", 0), ("7/8/2024", "8/7/2024", 0), ("192.168.0.1", "192.168.0.2", 0), ("3–1", "3-1", 1)],
    ],
    "an equation says what it names, or nothing": [
        *[("x+1=x+2", "x+2", 0), ("x=x+1=x+2", "x+2", 0), ("4=5=6", "6", 0), ("x=5=6", "6", 0)],
        *[(r"\pi=2\pi", r"2\pi", 0), (r"\pi\not=2\pi", r"2\pi", 0), (r"x\approx\pi", r"\pi", 0)],
        *[(r"x+1\Rightarrow y=x+2", "x+2", 0), ("2+6=8", "8", 1), (r"\binom52=10", "10", 1), ("a=b=5", "5", 1)],
        *[(r"m\angle A=40^\circ", "40", 1), ("x+y=5", "5", 1), (r"\frac{dy}{dx}=\frac1x", r"\frac1x", 1)],
        *[("f(x)=x^2", "x^2", 1), (r"\text{Area}=2\pi", r"2\pi", 1), ("y=2, x=1", "(1,2)", 1)],
        *[("x=1 or x=2", "2, 1", 1), ("n=2,3", "n=1,2", 0), ("2x+4y=6", "x+2y=3", 1), ("xy=1", r"y=\frac1x", 1)],
    ],
    "an answer that names several is none of them": [
        *[
            (rf"x+1 {between} x+2", "x+2", 0)
            for between in (r"\text{ or }", ",", r"\quad", r"\mid", r"\ne", r"\to", r"\\")
        ],
        *[(r"x+2\ \heartsuit", "x+2", 0), (r"x+2\text{ is wrong}", "x+2", 0), (r"\pm\sqrt3", r"\sqrt3", 0)],
        *[(r"\cancel{\pi}", r"\pi", 0), (r"\frac{1\pm\sqrt5}{2}", r"\frac{1-\sqrt5}{2},\frac{1+\sqrt5}{2}", 1)],
        *[("5 wrong", "5", 0), ("y+1!", "y+1", 0)],
    ],
    "another unit is another answer": [
        *[("9 m/s", "9 km/s", 0), ("5 hours", "5 minutes", 0), (r"12\text{ cm}^2", r"12\text{ cm}", 0)],
        *[("€12", "$12", 0), (r"5^\circ", r"5\text{ rad}", 0), (r"10\pi\text{ m}", r"10\pi\text{ cm}", 0)],
        *[(r"25^\circ C", r"25^\circ\text{F}", 0), (r"9.8\,\mathrm{m\,s^{-2}}", r"9.8\text{ m/s}^2", 1)],
        *[(r"5\ \mathrm{J/(mol\cdot K)}", r"5\ \mathrm{J\,K^{-1}\,mol^{-1}}", 1), (r"5\,\text{k}\Omega", "5", 1)],
        *[(r"5\ \mu\mathrm{m}", "5", 1), ("5 hours", "5 hr", 1), ("8 meters per second", "8 m/s", 1)],
        *[("12 square centimeters", r"12\text{ cm}^2", 1), (r"3\pi\text{ square units}", r"3\pi", 1)],
        ("4 apples", "4 pears", 1),
    ],
    "other ways to write it": [
        *[("1,00,000", "100000", 1), ("৪২", "42", 1), ("٤٢", "42", 1), ("22nd", "22", 1), ("2st", "2", 0)],
        *[(r"4^{\text{th}}", "4", 1), (r"0.\dot{4}5\dot{1}", r"\frac{451}{999}", 1), ("0.(3)", r"\frac13", 1)],
        *[("1.2*10^(-3)", "0.0012", 1), ("3,14", "3.14", 0), (r"\nicefrac34", "0.75", 1)],
        *[("3pi/4", r"\frac{3\pi}{4}", 1), (r"4\sqrt(2)", r"4\sqrt2", 1), ("2sqrt(3)", r"\sqrt{12}", 1)],
        *[(r"\langle 1,2\rangle", "(1,2)", 1), ("]0,1[", "(0,1)", 1), (r"\varnothing", r"\{\}", 1)],
        *[(r"\ce{H2O}", "H_2O", 1), (r"\mathrm{Fe}^{3+}", "Fe^{3+}", 1), (r"p\implies q", r"p\Rightarrow q", 1)],
        *[(r"\overline{AB}", r"\overline{BA}", 1), ("option B", "B", 1), ("AC", "C, A", 1), ("A", "A, C", 0)],
        *[("(B,A)", "(A,B)", 0), ("A and C", "AC", 1), ("101_{two}", "101_2", 1), ("2x>6", "x>3", 1)],
        *[(r"\sin^{-1}x", r"\arcsin x", 1), (r"\cos 2x", r"1-2\sin^2x", 1), (r"\frac{n!}{(n-1)!}", "n", 1)],
        *[(r"\frac1i", "-i", 1), (r"x<0\text{ or }x>2", r"(-\infty,0)\cup(2,\infty)", 1)],
        *[(r"\mathbb{R}\setminus\{1\}", r"x\ne1", 1), ("y>1", "x>1", 0)],
    ],
    "size, font and color are not compared": [
        *[(rf"\{look} 5", "5", 1) for look in ("large", "Large", "tiny", "bf", "mathrm", "text", "color{red}")],
        *[
            (rf"\{look}{{5}}", "5", 1)
            for look in ("underline", "Large", "bf", "textit", "ensuremath", "textcolor{red}")
        ],
        *[(r"{\frac{2}{3}}", r"\dfrac23", 1), (r"\textbf{\frac{2}{3}}", "0.5", 0)],
        *[(r"\boldsymbol x+1", "x+1", 1), (r"x\hspace{2mm}+1", "x+1", 1), (r"\phantom{1}5", "5", 1), (r"\R", "ℝ", 1)],
        *[(r"\underline{6}", "5", 0), (r"\phantom{5}", "5", 0), (r"\cancel{5}", "5", 0), (r"\color{5}6", "56", 0)],
        *[(r"\mathbf{R}x", r"\mathbb{R}x", 0), (r"\hat{5}", "5", 0), (r"\alpha\large x", r"\alpha x", 1)],
    ],
    "the name may stand on either side": [
        *[("5 = x", "x=5", 1), ("5 = y", "x=5", 0), ("6 = x", "x=5", 0), (r"\sqrt2 = x", r"\sqrt2", 1)],
        *[("5 = x = 6", "6", 0), ("2=x, 3=x", "2,3", 1), ("2=x, 3=x", "2,4", 0), ("x+5 = 5+y", "x=y", 1)],
    ],
    "an index tells roots apart": [
        *[("x_1=1, x_2=2", "1,2", 1), ("1,2", "x_1=1, x_2=2", 1), ("x_1=1, x_2=3", "1,2", 0)],
        *[("x_1=1, y_2=2", "1,2", 0), ("x_1=2, x_2=1", "x_1=1, x_2=2", 0), ("x_1", "x_2", 0)],
        (r"x_{1}=1\text{ or }x_{2}=2", "2,1", 1),
    ],
    "a system is its equations": [
        *[(r"\begin{cases}x=1\\y=2\end{cases}", reference, 1) for reference in ("(1,2)", "x=1,y=2", "y=2, x=1")],
        *[(rf"\begin{{{name}}}x&=1\\y&=2\end{{{name}}}", "(1,2)", 1) for name in ("aligned", "align*")],
        *[
            (r"\left\{\begin{array}{l}x=1\\y=2\end{array}\right.", reference, int(reference != "(2,1)"))
            for reference in ("(1,2)", "(2,1)", "x=1, y=2")
        ],
        *[
            (
                r"\begin{cases}x^2&x>0\\0&x\le0\end{cases}",
                rf"\begin{{cases}}{first},&x>0\\0,&x\leq0\end{{cases}}",
                is_equal,
            )
            for first, is_equal in (("xx", 1), ("x", 0))
        ],
        (r"\begin{cases}1\\2\end{cases}", "12", 0),
    ],
    "other brackets, fractions and marks": [
        *[("<1,2>", "(1,2)", 1), ("⟨1,2⟩", "(1,2)", 1), ("<1,2>", "(2,1)", 0), ("x<1, y>2", "y>2, x<1", 1)],
        *[("1<2", "(1,2)", 0), ("abs(x-1)", "|x-1|", 1), (r"\operatorname{abs}(x)", "|y|", 0)],
        *[("max(1,x)", r"\max(1,x)", 1), (r"{1\over2}", "0.5", 1), (r"x+{a^{2} \over b}", r"x+\frac{a^2}b", 1)],
        *[(r"{a+b\over c}", r"a+\frac bc", 0), (r"{n\choose2}", r"\binom n2", 1), (r"{n\choose2}", r"\frac n2", 0)],
        *[(r"\mathbb R-\{1\}", r"\mathbb{R}\setminus\{1\}", 1), (r"\mathbb Z-\{0\}", r"\mathbb{Z}\setminus\{0\}", 1)],
        *[(r"\mathbb R-\{1\}", item, 0) for item in (r"\mathbb{R}", r"\{1\}", r"\mathbb R-\{2\}", r"\mathbb Z-\{1\}")],
        *[(r"\{x\mid x>1\}", r"(1,\infty)", 1), (r"\{x: 0<x<1\}", "(0,1)", 1), (r"\{x|x>1\}", "x>2", 0)],
        *[("3 to 2", "3:2", 1), (r"3\text{ to }2", "6:4", 1), ("2 to 3", "3:2", 0), ("6 to 10", "3 to 5", 0)],
        *[("3 to 2", "2", 0), (r"\ce{Fe^3+}", "Fe^{3+}", 1), (r"\ce{SO4^2-}", "SO_4^{2-}", 1)],
        *[(r"\ce{Na+}", "Na^+", 1), (r"\ce{Fe^3+}", "Fe^{2+}", 0), (r"\ce{Fe^3+}", "Fe^3", 0)],
        (r"\ce{2H2 + O2 -> 2H2O}", r"2H_2+O_2\to 2H_2O", 1),
    ],
    "a letter is a unit if it is written as one": [
        *[(r"5\frac{m}{s}", "5", 0), (r"5\cdot m", "5", 0), ("5/m", "5", 0), (r"5\frac{km}{h}", "5 km/h", 1)],
        *[("5 m/s", "5", 1), ("₹5", "5", 1), ("Rs. 5", "₹5", 1), ("₹5", "$5", 0), ("₩5", "₽5", 0), ("5''", "5", 1)],
        *[("5′", "5 ft", 1), ("5'", "5''", 0), ('5"', "5 inches", 1), ("5'", "5 cm", 0), ("x'", "x", 0)],
        *[("f''", "f", 0), (r"x^\circ", r"x\text{ rad}", 0), (r"x^\circ", r"x\text{ cm}", 0)],
        (r"10\pi^\circ", r"10\pi", 1),
    ],
}
