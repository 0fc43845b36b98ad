// The part of the time that is shown, shared by all charts: [from, to] in ns, within [0, whole].
class View {
  constructor(whole) {
    this.whole = Math.max(1, whole);
    this.from = 0;
    this.to = this.whole;
    this.listeners = [];
  }
  get length() { return this.to - this.from; }
  show(from, to) {
    const length = Math.min(this.whole, Math.max(200, to - from));
    this.from = Math.min(Math.max(0, from), this.whole - length);
    this.to = this.from + length;
    this.listeners.forEach((act) => act());
  }
  pan(by) { this.show(this.from + by, this.to + by); }
  zoom(factor, around = (this.from + this.to) / 2) {
    // The zoomed length is bounded first: at the ends of the range the point looked at must stay where it is.
    const length = Math.min(this.whole, Math.max(200, this.length / factor));
    const from = around - ((around - this.from) * length) / this.length;
    this.show(from, from + length);
  }
  all() { this.show(0, this.whole); }
}

// Calls `act` once before the next picture however often it is asked.
const oncePerFrame = (act) => {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; act(); });
  };
};
