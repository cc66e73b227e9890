// Numbers as exact fractions of BigInts, and rounding onto a format: what halfstep.formats.exact does, line by line.
const exact = (() => {
  const compare = (a, b) => { const left = a.n * b.d, right = b.n * a.d; return left < right ? -1 : left > right ? 1 : 0; };
  const minus = (a, b) => ({ n: a.n * b.d - b.n * a.d, d: a.d * b.d });
  const half = (a, b) => ({ n: a.n * b.d + b.n * a.d, d: 2n * a.d * b.d });
  const size = (a) => ({ n: a.n < 0n ? -a.n : a.n, d: a.d });
  const isFraction = (x) => typeof x !== "number";
  const bitLength = (n) => (n ? n.toString(2).length : 0);

  // A finite float64 as the fraction that it is.
  const view = new DataView(new ArrayBuffer(8));
  const ofFloat = (x) => {
    view.setFloat64(0, x);
    const bits = view.getBigUint64(0), exponent = Number((bits >> 52n) & 0x7ffn);
    const digits = (bits & ((1n << 52n) - 1n)) | (exponent ? 1n << 52n : 0n);
    const power = Math.max(exponent, 1) - 1075, n = bits >> 63n ? -digits : digits;
    return power >= 0 ? { n: n << BigInt(power), d: 1n } : { n, d: 1n << BigInt(-power) };
  };

  // The nearest float64 of a fraction, or one beside it: for showing, never for deciding.
  const toFloat = ({ n, d }) => {
    if (!n) return 0;
    const shift = 60 - bitLength(n < 0n ? -n : n) + bitLength(d);
    const scaled = shift >= 0 ? (n << BigInt(shift)) / d : n / (d << BigInt(-shift));
    return Number(scaled) * 2 ** -Math.min(shift, 1000) * 2 ** -Math.max(shift - 1000, 0);
  };

  // The number that a text stands for: a fraction, or one of Infinity, NaN and -0; null where it stands for none.
  const LARGEST = 4000;
  const read = (given) => {
    const text = given.length <= 400 ? given.trim().replaceAll("_", "").toLowerCase() : "";
    const special = /^([+-]?)(inf|infinity|nan)$/.exec(text);
    if (special) return special[2] === "nan" ? NaN : special[1] === "-" ? -Infinity : Infinity;
    const value = fraction(text);
    return value && !value.n && text.startsWith("-") ? -0 : value;
  };
  const fraction = (text) => {
    let found = /^([+-]?)(\d+\.?\d*|\.\d+)(?:e([+-]?\d+))?$/.exec(text);
    if (found) return times(signed(found[1], decimal(found[2])), power(10n, found[3] || "0", LARGEST / 4));
    found = /^([+-]?)0x([0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p([+-]?\d+))?$/.exec(text);
    if (found) {
      const [whole, rest = ""] = found[2].split(".");
      const digits = { n: BigInt("0x" + (whole + rest || "0")), d: 16n ** BigInt(rest.length) };
      return times(signed(found[1], digits), power(2n, found[3] || "0", LARGEST));
    }
    found = /^([+-]?\d+)\/(\d+)$/.exec(text);
    if (found) return BigInt(found[2]) ? { n: BigInt(found[1].replace("+", "")), d: BigInt(found[2]) } : null;
    found = /^([+-]?)(?:(\d+\.?\d*|\.\d+)\*)?2(?:\^|\*\*)\(?([+-]?\d+)\)?$/.exec(text);
    return found ? times(signed(found[1], decimal(found[2] || "1")), power(2n, found[3], LARGEST)) : null;
  };
  const decimal = (text) => {
    const [whole, rest = ""] = text.split(".");
    return { n: BigInt(whole + rest || "0"), d: 10n ** BigInt(rest.length) };
  };
  const signed = (sign, a) => (sign === "-" ? { n: -a.n, d: a.d } : a);
  const times = (a, b) => b && { n: a.n * b.n, d: a.d * b.d };
  const power = (base, text, largest) => {
    const exponent = Number(text);
    if (Math.abs(exponent) > largest) return null;
    return exponent >= 0 ? { n: base ** BigInt(exponent), d: 1n } : { n: 1n, d: base ** BigInt(-exponent) };
  };

  // The value of a code: every one is a float64.
  const decode = (f, code) => {
    const negative = code >= 2 ** (f.bits - 1);
    if (f.kind === "float") {
      const steps = 2 ** f.mantissa, last = 2 ** f.exponent - 1, rest = code % 2 ** (f.bits - 1);
      const e = Math.floor(rest / steps), m = rest % steps;
      if (f.specials === "ieee" && e === last) return m ? NaN : negative ? -Infinity : Infinity;
      if (f.specials === "fn" && e === last && m === steps - 1) return NaN;
      if (f.specials === "fnuz" && negative && rest === 0) return NaN;
      const value = (m + (e ? steps : 0)) * 2 ** (Math.max(e, 1) - f.bias - f.mantissa);
      return negative ? -value : value;
    }
    if (f.kind === "posit") {
      if (code === 0 || code === 2 ** (f.bits - 1)) return code ? NaN : 0;
      return negative ? -magnitude(f, 2 ** f.bits - code, f.bits) : magnitude(f, code, f.bits);
    }
    if (f.kind === "integer") return (code - (f.low < 0 && negative ? 2 ** f.bits : 0)) / 2 ** f.fraction;
    if (f.kind === "exponent") return code === 255 ? NaN : 2 ** (code - 127);
    return f.table[code];
  };
  const magnitude = (f, code, width) => {
    const body = code.toString(2).padStart(width - 1, "0"), run = /^(0+|1+)/.exec(body)[0].length;
    const regime = body[0] === "1" ? run - 1 : -run, rest = body.slice(run + 1);
    const exponent = parseInt(rest.slice(0, f.es).padEnd(f.es, "0") || "0", 2), digits = rest.slice(f.es);
    return (2 ** digits.length + parseInt(digits || "0", 2)) * 2 ** (regime * 2 ** f.es + exponent - digits.length);
  };

  // The finite values in ascending order, by number: from `first` to `last`.
  const mirrored = (f) => f.kind === "float" || f.kind === "posit";
  const lines = new Map();
  const line = (f) => {
    if (!lines.has(f.name)) lines.set(f.name, mirrored(f) ? along(f) : listed(f));
    return lines.get(f.name);
  };
  const along = (f) => {
    let low = 0, high = 2 ** (f.bits - 1);  // the first code whose value is not below the largest
    while (low < high) {
      const middle = Math.floor((low + high) / 2), value = decode(f, middle);
      if (value < f.max) low = middle + 1; else high = middle;
    }
    const value = (number) => (number < 0 ? -decode(f, -number) : decode(f, number));
    const code = (number) => (number >= 0 ? number : f.kind === "posit" ? 2 ** f.bits + number : 2 ** (f.bits - 1) - number);
    return { first: -low, last: low, value, code };
  };
  const listed = (f) => {
    const codes = new Map();
    for (let code = 0; code < 2 ** f.bits; code++) {
      const value = decode(f, code) + 0;
      if (Number.isFinite(value) && !codes.has(value)) codes.set(value, code);
    }
    let values = [...codes.keys()].sort((a, b) => a - b);
    if (f.kind === "integer") values = values.filter((value) => value >= f.min);
    return { first: 0, last: values.length - 1, value: (number) => values[number], code: (number) => codes.get(values[number]) };
  };
  // The number of the largest value that is at most x; one less than the first where every value is larger.
  const atMost = (f, x) => {
    const { first, last, value } = line(f);
    let low = first, high = last + 1;
    while (low < high) {
      const middle = Math.floor((low + high) / 2);
      if (compare(ofFloat(value(middle)), x) <= 0) low = middle + 1; else high = middle;
    }
    return low - 1;
  };

  const infinity = (f) => line(f).last + 1;
  const nanCode = (f, negative) => {
    const sign = 2 ** (f.bits - 1);
    if (f.kind === "posit") return sign;
    if (f.kind === "exponent") return 255;
    if (f.kind !== "float" || !f.nan) return null;
    if (f.infinity) return infinity(f) + 2 ** (f.mantissa - 1);
    return f.specials === "fnuz" ? sign : negative ? 2 * sign - 1 : sign - 1;
  };

  const neighbours = (f, x) => {
    const values = line(f), number = atMost(f, x);
    const at = (n) => {
      if (n >= values.first && n <= values.last) return { value: ofFloat(values.value(n)), code: values.code(n) };
      if (f.kind !== "float") return null;
      const end = ofFloat(f.max), step = ofFloat(2 ** (Math.floor(Math.log2(f.max)) - f.mantissa));
      const follows = { n: end.n * step.d + step.n * end.d, d: end.d * step.d };
      return { value: n > 0 ? follows : { n: -follows.n, d: follows.d }, code: null };
    };
    return [at(number), at(number + 1)];
  };
  const boundary = (f, below, above) => {
    if (f.kind === "posit") {
      const [near, far] = [size(below), size(above)].sort(compare);
      if (!near.n) return near;
      if (compare(far, { n: 4n * near.n, d: near.d }) >= 0) {
        const ratio = Math.floor(bitLength((far.n * near.d) / (far.d * near.n)) / 2);
        const mean = near.n << BigInt(ratio);
        return { n: above.n > 0n ? mean : -mean, d: near.d };
      }
    }
    return half(below, above);
  };

  const ZERO = { n: 0n, d: 1n };
  const isNegative = (x) => (isFraction(x) ? x.n < 0n : x < 0 || Object.is(x, -0));
  const landed = (f, rounded, value) => {
    const values = line(f), number = values.value(atMost(f, value));
    const code = values.code(atMost(f, value));
    if (!value.n && isNegative(rounded.x) && f.kind === "float" && f.negativeZero) {
      return { ...rounded, value: -0, code: code + 2 ** (f.bits - 1) };
    }
    return { ...rounded, value: number, code };
  };
  const saturates = (f, overflow) => overflow === "saturate" || !(f.infinity || f.nan);
  const leaves = (f, x, rounding) => {
    if (f.kind === "float") return true;
    const endless = !isFraction(x) && !Number.isFinite(x);
    if (f.kind === "posit" || rounding === "toward_zero" || rounding === "down") return endless;
    return rounding === "up" || (endless ? x > 0 : f.overflowFrom !== null && compare(x, ofFloat(f.overflowFrom)) >= 0);
  };
  const beyond = (f, rounded, end, rounding, overflow) => {
    const negative = isNegative(rounded.x);
    if (saturates(f, overflow) || !leaves(f, rounded.x, rounding)) return landed(f, rounded, ofFloat(end));
    if (f.kind === "float" && f.infinity) {
      return { ...rounded, value: negative ? -Infinity : Infinity, code: infinity(f) + (negative ? 2 ** (f.bits - 1) : 0) };
    }
    return { ...rounded, value: NaN, code: nanCode(f, negative) };
  };
  const rises = (f, x, below, above, turn, rounding) => {
    if (!rounding.startsWith("nearest")) return { toward_zero: x.n < 0n, up: true, down: false }[rounding];
    const side = compare(x, turn);
    if (side) return side > 0;
    if (rounding === "nearest_away") return compare(size(above.value), size(below.value)) >= 0;
    if (rounding === "nearest_up") return true;
    if (f.ties !== "even") return f.ties === "upper";
    return above.code !== null ? above.code % 2 === 0 : below.code !== null && below.code % 2 === 1;
  };

  // x rounded onto a format: value (null where stochastic rounding has a choice), code, neighbours, boundary, overflow.
  const round = (f, x, rounding = "nearest_even", overflow = "saturate") => {
    const plain = { x, value: null, code: null, below: null, above: null, boundary: null, overflow: false };
    if (Number.isNaN(x) || (f.min > 0 && (isFraction(x) ? x.n <= 0n : x <= 0))) return { ...plain, value: NaN, code: nanCode(f, false) };
    if (!isFraction(x) && !Number.isFinite(x)) {
      const lost = f.kind === "posit" || f.specials === "fnuz";
      return beyond(f, { ...plain, overflow: true }, x > 0 ? f.max : f.min, rounding, lost ? "ieee" : overflow);
    }
    const number = isFraction(x) ? x : ZERO;
    const [below, above] = neighbours(f, number);
    const at = [below, above].find((each) => each && each.code !== null && !compare(each.value, number));
    if (at) return landed(f, plain, at.value);
    if (!below || !above) return beyond(f, { ...plain, overflow: true }, below ? f.max : f.min, rounding, overflow);
    const turn = boundary(f, below.value, above.value);
    const between = { ...plain, below, above, boundary: turn };
    const surely = compare(number, above.value) >= 0;
    const certain = rounding !== "stochastic" || surely || compare(number, below.value) <= 0;
    const up = rounding === "stochastic" ? surely : rises(f, number, below, above, turn, rounding);
    const chosen = up ? above : below, end = number.n > 0n ? f.max : f.min;
    if (certain && chosen.code !== null) {
      const past = [below, above].some((each) => each.code === null && compare(size(number), size(each.value)) >= 0);
      return landed(f, { ...between, overflow: past }, chosen.value);
    }
    if (certain || ((below.code === null || above.code === null) && saturates(f, overflow))) {
      return beyond(f, { ...between, overflow: true }, end, rounding, overflow);
    }
    return between;
  };

  return { atMost, compare, decode, infinity, line, minus, nanCode, ofFloat, read, round, size, toFloat, isFraction };
})();
