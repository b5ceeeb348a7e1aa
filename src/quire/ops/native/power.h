/* e to the power of x, which is not beyond 87 either way, as 2^whole * 2^part, where -0.5 <= part <= 0.5 and a polynomial stands
   for the second. For vectors of floats `vec` with integers `ivec` as wide. */
INLINE vec raise(vec x) {
    vec y = x * 1.44269504f, shifted = y + 12582912.f; /* 1.5 * 2^23: the whole number is in the low bits */
    vec part = y - (shifted - 12582912.f);
    vec p = part * 1.53527e-4f + 1.339887e-3f;
    p = p * part + 9.618437e-3f;
    p = p * part + 5.550332e-2f;
    p = p * part + 2.4022648e-1f;
    p = p * part + 6.9314718e-1f;
    p = p * part + 1.f;
    return p * (vec)(((ivec)shifted - 0x4B400000 + 127) << 23);
}

/* the same for x <= 0 of any size: what is less is nothing */
INLINE vec power(vec x) { return (vec)((x > -87.f) & (ivec)raise(x)); }
