// What one of several devices holds of what stays from step to step: halfstep.accounting.sharing, in whole numbers.
const share = (() => {
  const BUCKET = 500000000n;
  const least = (a, b) => (a < b ? a : b);

  // row: { parameters, trained, weights, buffers, gradients, master, states, scales, state_scales }
  const share = (row, ranks, zero) => {
    const held = Object.fromEntries(Object.entries(row).map(([name, value]) => [name, BigInt(value)]));
    const divided = (size, stage) => { const by = BigInt(zero >= stage ? ranks : 1); return (size + by - 1n) / by; };
    const found = {
      weights: divided(held.weights, 3),
      gradients: divided(held.gradients, 2),
      master: divided(held.master, 1),
      states: divided(held.states, 1),
      scales: divided(held.scales, 3) + divided(held.state_scales, 1),
      buffers: held.buffers,
      communication: communication(held, ranks, zero),
    };
    return { ...found, persistent: Object.values(found).reduce((sum, each) => sum + each, 0n) };
  };
  const communication = (held, ranks, zero) => {
    if (ranks === 1) return 0n;
    if (zero === 0) return held.gradients;
    const reduced = (held.gradients * least(held.trained, BUCKET)) / (held.trained > 1n ? held.trained : 1n);
    return reduced + (held.weights * least(held.parameters, BUCKET)) / held.parameters;
  };
  return share;
})();
