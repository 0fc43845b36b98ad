// The part of the run that all charts show: the times [from, to] in ns, within [0, whole].
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
    this.listeners.forEach((listener) => listener());
  }
  pan(by) { this.show(this.from + by, this.to + by); }
  zoom(factor, around = (this.from + this.to) / 2) {
    // Clamp the length first, so that `around` keeps its position on the screen at the zoom limits too.
    const length = Math.min(this.whole, Math.max(200, this.length / factor));
    const from = around - ((around - this.from) * length) / this.length;
    this.show(from, from + length);
  }
  all() { this.show(0, this.whole); }
}

// Returns a function that calls `action` at most once per animation frame.
const oncePerFrame = (action) => {
  let pending = false;
  return () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; action(); });
  };
};
