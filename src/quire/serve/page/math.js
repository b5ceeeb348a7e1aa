// TeX as models write it, into MathML, which browsers draw themselves. A subset: what it does not know is shown as it was written.
// Length and depth are bounded, and every character is read once.

const MOST_TEX = 4000; // characters of one formula
const MOST_TEX_DEPTH = 60; // every pair of braces counts twice
const MOST_TEX_CELLS = 400; // of a matrix

const pairs = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => pair.split("=")));
const GREEK = pairs(`alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν
  xi=ξ pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ
  Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω infty=∞ partial=∂ nabla=∇ hbar=ℏ ell=ℓ emptyset=∅ varnothing=∅ Re=ℜ Im=ℑ aleph=ℵ imath=ı
  jmath=ȷ dots=… ldots=… cdots=⋯ vdots=⋮ ddots=⋱ angle=∠ triangle=△ top=⊤ bot=⊥ degree=° prime=′`);
const SIGNS = pairs(`times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙ cup=∪ cap=∩ setminus=∖ wedge=∧
  land=∧ vee=∨ lor=∨ neg=¬ lnot=¬ le=≤ leq=≤ leqslant=≤ ge=≥ geq=≥ geqslant=≥ ne=≠ neq=≠ equiv=≡ approx=≈ sim=∼ simeq=≃ cong=≅ propto=∝ ll=≪ gg=≫
  in=∈ notin=∉ ni=∋ subset=⊂ subseteq=⊆ supset=⊃ supseteq=⊇ mid=∣ parallel=∥ perp=⊥ vdash=⊢ models=⊨ forall=∀ exists=∃ nexists=∄ to=→
  rightarrow=→ longrightarrow=⟶ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ implies=⟹ Leftarrow=⇐ Leftrightarrow=⇔ iff=⟺ mapsto=↦ uparrow=↑
  downarrow=↓ hookrightarrow=↪ therefore=∴ because=∵ lbrace={ rbrace=} {={ }=} langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉
  vert=| lvert=| rvert=| Vert=‖ lVert=‖ rVert=‖ |=‖ backslash=\\ %=% $=$ #=# &=& _=_ colon=: square=□ blacksquare=■`);
const LARGE = pairs("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀ int=∫ iint=∬ iiint=∭ oint=∮");
const NAMED = new Set(("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg gcd Pr arg hom max min sup inf lim " +
  "limsup liminf argmax argmin").split(" "));
const LIMITS = new Set("max min sup inf lim limsup liminf argmax argmin det gcd Pr".split(" "));
const ACCENTS = pairs("hat=^ widehat=^ bar=¯ overline=¯ vec=→ overrightarrow=→ tilde=~ widetilde=~ dot=˙ ddot=¨ check=ˇ breve=˘");
const SPACES = { ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, "!": -0.17, " ": 0.25, quad: 1, qquad: 2, enspace: 0.5, thinspace: 0.17 };
const FENCES = { matrix: "  ", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{ ", smallmatrix: "  ", array: "  " };
const ROWS = new Set("aligned align align* split gather gather* gathered equation equation* alignedat eqnarray".split(" "));
// alphabets: where A, a and 0 begin, and the letters that lie elsewhere
const ALPHABETS = {
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, pairs("C=ℂ H=ℍ N=ℕ P=ℙ Q=ℚ R=ℝ Z=ℤ")],
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}],
  mathcal: [0x1d49c, 0x1d4b6, 0, pairs("B=ℬ E=ℰ F=ℱ H=ℋ I=ℐ L=ℒ M=ℳ R=ℛ e=ℯ g=ℊ o=ℴ")],
  mathfrak: [0x1d504, 0x1d51e, 0, pairs("C=ℭ H=ℌ I=ℑ R=ℜ Z=ℨ")],
};
Object.assign(ALPHABETS, { boldsymbol: ALPHABETS.mathbf, bm: ALPHABETS.mathbf, mathscr: ALPHABETS.mathcal });
const UPRIGHT = new Set("text textrm textbf textit texttt mathrm mathsf mathtt mathit operatorname mbox".split(" "));
const TOKENS = /\\(?:[A-Za-z]+|[^])|\d+(?:[.,]\d+)*|\s+|[^]/gu;

class TexError extends Error {}

function ml(tag, props, ...children) {
  const node = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  for (const [name, value] of Object.entries(props || {})) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const operator = (text, props) => ml("mo", props, text);
const row = (nodes) => (nodes.length === 1 ? nodes[0] : ml("mrow", {}, ...nodes));

/** A formula, or null if it cannot be read. */
function renderMath(tex, display) {
  if (tex.length > MOST_TEX) return null;
  try {
    const reader = new TexReader(tex.match(TOKENS) || []);
    const nodes = reader.until(() => false);
    return ml("math", { ...(display && { display: "block" }), alttext: tex.trim() }, ml("mrow", {}, ...nodes));
  } catch (error) {
    if (error instanceof TexError) return null;
    throw error;
  }
}

class TexReader {
  constructor(tokens) {
    this.tokens = tokens;
    this.at = 0;
    this.depth = 0;
    this.cells = 0;
  }

  skip() {
    while (/^\s/.test(this.tokens[this.at] || "")) this.at += 1;
    return this.tokens[this.at];
  }

  next() {
    this.skip();
    if (this.at >= this.tokens.length) throw new TexError("it ends too early");
    return this.tokens[this.at++];
  }

  expect(wanted) {
    if (this.next() !== wanted) throw new TexError(`${wanted} is missing`);
  }

  /** Nodes up to a token that ends them, which is left there; at the top, up to the end. */
  until(ends) {
    if ((this.depth += 1) > MOST_TEX_DEPTH) throw new TexError("too deep");
    const nodes = [];
    for (let token; (token = this.skip()) !== undefined && !ends(token); ) {
      if (token === "}" || token === "&" || token === "\\\\" || token === "\\right" || token === "\\end") throw new TexError(`${token} without a beginning`);
      const node = this.scripted();
      if (node) nodes.push(node);
    }
    this.depth -= 1;
    return nodes;
  }

  group() {
    if ((this.depth += 1) > MOST_TEX_DEPTH) throw new TexError("too deep");
    let nodes;
    if (this.skip() === "{") {
      this.at += 1;
      nodes = this.until((token) => token === "}");
      this.expect("}");
    } else nodes = [this.atom(this.next())].filter(Boolean);
    this.depth -= 1;
    return row(nodes);
  }

  /** The characters between braces, as they are. */
  raw() {
    if (this.skip() !== "{") return this.next();
    let text = "";
    let open = 0;
    for (this.at += 1; this.at < this.tokens.length; this.at += 1) {
      const token = this.tokens[this.at];
      if (token === "}" && open-- === 0) {
        this.at += 1;
        return text;
      }
      if (token === "{") open += 1;
      text += token;
    }
    throw new TexError("} is missing");
  }

  /** An atom with what stands below and above it. */
  scripted() {
    const token = this.skip();
    let base = token === "^" || token === "_" ? ml("mrow") : this.atom(this.next());
    if (!base) return null;
    let limits = base.limits;
    let below = null;
    let above = null;
    for (let mark; (mark = this.skip()) !== undefined; ) {
      if (mark === "\\limits" || mark === "\\nolimits") limits = mark === "\\limits";
      else if (mark === "'") above = row([...(above ? [above] : []), operator("′")]);
      else if (mark === "_" && !below) {
        this.at += 1;
        below = this.group();
        continue;
      } else if (mark === "^" && (!above || above.textContent === "′")) {
        this.at += 1;
        above = row([...(above ? [above] : []), this.group()]);
        continue;
      } else break;
      this.at += 1;
    }
    const [under, over, both] = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (below && above) base = ml(both, {}, base, below, above);
    else if (below || above) base = ml(below ? under : over, {}, base, below || above);
    return base;
  }

  atom(token) {
    if (token === "{") {
      this.at -= 1;
      return this.group();
    }
    if (token === "}" || token === "&") throw new TexError(`${token} without a beginning`);
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return ml("mn", {}, token);
    if (/^\p{L}/u.test(token)) return ml("mi", {}, token);
    if (token === "~") return ml("mspace", { width: "0.25em" });
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token, /[()[\]|]/.test(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (GREEK[name]) return ml("mi", /[A-Z…⋯]/.test(name[0] + GREEK[name]) ? { mathvariant: "normal" } : {}, GREEK[name]);
    if (SIGNS[name]) return operator(SIGNS[name], { stretchy: "false" });
    if (name in SPACES) return ml("mspace", { width: `${SPACES[name]}em` });
    if (LARGE[name]) return Object.assign(operator(LARGE[name], { largeop: "true" }), { limits: !name.includes("int") });
    if (NAMED.has(name)) {
      const rspace = /^[([{^_]/.test(this.skip() || "") ? "0" : "0.17em";
      return Object.assign(operator(name, { lspace: "0.17em", rspace }), { limits: LIMITS.has(name) });
    }
    if (UPRIGHT.has(name)) return ml("mtext", {}, this.raw().replaceAll(" ", "\u00a0"));
    if (ALPHABETS[name]) return this.lettered(ALPHABETS[name]);
    if (ACCENTS[name]) return ml("mover", { accent: "true" }, this.group(), operator(ACCENTS[name], { stretchy: String(/^(wide|over)/.test(name)) }));
    return this.construction(name);
  }

  construction(name) {
    if (/^[dt]?frac$/.test(name)) return ml("mfrac", {}, this.group(), this.group());
    if (/^[dt]?binom$/.test(name)) return ml("mrow", {}, operator("("), ml("mfrac", { linethickness: "0" }, this.group(), this.group()), operator(")"));
    if (name === "sqrt") return this.root();
    if (name === "underline") return ml("munder", {}, this.group(), operator("_", { stretchy: "true" }));
    if (name === "overbrace") return Object.assign(ml("mover", {}, this.group(), operator("⏞")), { limits: true });
    if (name === "underbrace") return Object.assign(ml("munder", {}, this.group(), operator("⏟")), { limits: true });
    if (name === "overset" || name === "stackrel") return this.swapped("mover");
    if (name === "underset") return this.swapped("munder");
    if (name === "left") return this.fenced();
    if (name === "begin") return this.environment(this.raw());
    if (name === "boxed") return ml("mrow", { class: "boxed" }, this.group());
    if (name === "not") return operator(`${this.group().textContent}\u0338`);
    if (name === "pmod") return ml("mrow", {}, operator("("), ml("mtext", {}, "mod "), this.group(), operator(")"));
    if (name === "bmod" || name === "mod") return operator("mod");
    if (/^([bB]igg?[lrm]?|middle)$/.test(name)) return operator(this.delimiter(), { stretchy: "true" });
    if (/^(displaystyle|textstyle|limits|nolimits|nonumber|notag|hline)$/.test(name)) return null;
    if (name === "tag" || name === "label" || name === "color") {
      const text = this.raw();
      return name === "tag" ? ml("mtext", {}, `\u2003(${text})`) : null;
    }
    return ml("mtext", {}, `\\${name}`);
  }

  root() {
    if (this.skip() !== "[") return ml("msqrt", {}, this.group());
    this.at += 1;
    const index = this.until((token) => token === "]");
    this.expect("]");
    return ml("mroot", {}, this.group(), row(index));
  }

  swapped(tag) {
    const small = this.group();
    return ml(tag, {}, this.group(), small);
  }

  delimiter() {
    const token = this.next();
    return token === "." ? "" : token[0] === "\\" ? SIGNS[token.slice(1)] || token.slice(1) : token;
  }

  fenced() {
    const open = this.delimiter();
    const inner = this.until((token) => token === "\\right");
    this.expect("\\right");
    return ml("mrow", {}, operator(open, { fence: "true", stretchy: "true" }), ...inner, operator(this.delimiter(), { fence: "true", stretchy: "true" }));
  }

  environment(name) {
    const fences = ROWS.has(name) ? "  " : FENCES[name];
    if (!fences) throw new TexError(`there is no ${name} here`);
    if (name === "array" || name === "alignedat") this.raw(); // columns
    const rows = [[]];
    const ends = (token) => token === "&" || token === "\\\\" || token === "\\end";
    for (;;) {
      if ((this.cells += 1) > MOST_TEX_CELLS) throw new TexError("too many cells");
      rows.at(-1).push(ml("mtd", {}, ...this.until(ends)));
      const end = this.next();
      if (end === "\\end") break;
      if (end !== "\\\\") continue;
      rows.push([]);
      if (this.skip() === "[") while (this.next() !== "]"); // room between rows
    }
    if (this.raw() !== name) throw new TexError("another environment ends here");
    if (rows.at(-1).every((cell) => !cell.firstChild)) rows.pop();
    const className = ROWS.has(name) ? "aligned" : name === "cases" ? "cases" : "matrix";
    const table = ml("mtable", { class: className, displaystyle: String(ROWS.has(name)) }, ...rows.map((cells) => ml("mtr", {}, ...cells)));
    const [open, close] = fences;
    return ml("mrow", {}, ...(open === " " ? [] : [operator(open, { fence: "true" })]), table, ...(close === " " ? [] : [operator(close, { fence: "true" })]));
  }

  lettered([upper, lower, digit, others]) {
    const change = (sign) => {
      const code = sign.codePointAt(0);
      if (others[sign]) return others[sign];
      if (/[A-Z]/.test(sign)) return String.fromCodePoint(upper + code - 65);
      if (/[a-z]/.test(sign)) return String.fromCodePoint(lower + code - 97);
      return digit && /\d/.test(sign) ? String.fromCodePoint(digit + code - 48) : sign;
    };
    const node = this.group();
    const walk = (one) => {
      if (one.nodeType === 3) one.data = [...one.data].map(change).join("");
      else one.childNodes.forEach(walk);
    };
    walk(node);
    return node;
  }
}
