// Pointer, wheel and keyboard handlers of a Gantt chart.
Object.assign(Gantt.prototype, {
  listen() {
    const canvas = this.canvas;
    let dragX = null; // clientX of the last event of a drag, null outside a drag
    canvas.addEventListener("pointerdown", (event) => {
      const unit = event.offsetX < GUTTER ? this.unitAt(event.offsetY) : -1;
      if (unit >= 0) { this.toggle(unit); return; }
      dragX = event.clientX;
      canvas.setPointerCapture(event.pointerId);
      canvas.classList.add("dragged");
    });
    canvas.addEventListener("pointermove", (event) => {
      if (dragX !== null) {
        this.view.pan(((dragX - event.clientX) / (this.width - GUTTER)) * this.view.length);
        dragX = event.clientX;
      } else {
        this.hover(event);
      }
    });
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => { dragX = null; canvas.classList.remove("dragged"); });
    }
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("dblclick", (event) => this.view.zoom(4, this.time(event.offsetX)));
    canvas.addEventListener("wheel", (event) => {
      // A wheel without Ctrl scrolls the page.
      const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
      if (event.ctrlKey || event.metaKey) this.view.zoom(Math.exp(-event.deltaY / 300), this.time(event.offsetX));
      else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) this.view.pan((sideways / this.width) * this.view.length);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const actions = {
        ArrowLeft: () => this.view.pan(-this.view.length / 8), ArrowRight: () => this.view.pan(this.view.length / 8),
        "+": () => this.view.zoom(1.5), "=": () => this.view.zoom(1.5), "-": () => this.view.zoom(1 / 1.5), 0: () => this.view.all(),
      };
      if (!actions[event.key] || event.ctrlKey || event.metaKey) return;
      actions[event.key]();
      event.preventDefault();
    });
    let dragging = false;
    const centre = (event) => {
      const t = ((event.offsetX - GUTTER) / (this.width - GUTTER)) * this.view.whole;
      this.view.show(t - this.view.length / 2, t + this.view.length / 2);
    };
    this.overview.addEventListener("pointerdown", (event) => {
      dragging = true;
      this.overview.setPointerCapture(event.pointerId);
      centre(event);
    });
    this.overview.addEventListener("pointermove", (event) => { if (dragging) centre(event); });
    this.overview.addEventListener("pointerup", () => { dragging = false; });
  },

  hover(event) {
    const i = this.spanAt(event.offsetX, event.offsetY), wait = i < 0 ? this.waitAt(event.offsetX, event.offsetY) : null;
    const unit = this.unitAt(event.offsetY);
    this.canvas.style.cursor = unit >= 0 && event.offsetX < GUTTER && this.start.length ? "pointer" : "";
    if (i !== this.hovered) { this.hovered = i; this.draw(); }
    if (i >= 0) this.tip.show(event, ...this.described(i));
    else if (wait) {
      const cause = this.run.causes[wait[2]], where = unit < 0 ? [] : [["device", this.run.units[unit][1]]];
      this.tip.show(event, cause === "compute" ? cause : `Waits: ${cause}`,
        [...where, ["start", formatTime(wait[0])], ["duration", formatTime(wait[1])]]);
    } else if (unit >= 0 && event.offsetX < GUTTER) this.tip.show(event, this.run.units[unit][1], []);
    else this.tip.hide();
  },

  leave() {
    this.tip.hide();
    if (this.hovered >= 0) { this.hovered = -1; this.draw(); }
  },

  // Returns the title and the lines of the tooltip of span i, an operation of the run.
  described(i) {
    const { spans, tiles, sizes } = this.run;
    const [bytes, flops] = sizes[spans.size[i]], length = this.end[i] - this.start[i], after = this.blocker(i);
    const lines = [
      ["tile", tiles[spans.tile[i]].join(", ")], ["step", spans.step[i]],
      ["start", `${(this.start[i] / 1e9).toFixed(6)} s`], ["duration", formatTime(length)],
    ];
    if (bytes) lines.push(["bytes", formatSize(bytes)], ["rate", formatRate(bytes, length, "B")]);
    if (flops) lines.push(["work", scaled(flops, ["", "k", "M", "G", "T", "P"].map((p) => `${p}FLOP`), 1000)], ["rate", formatRate(flops, length, "FLOP")]);
    if (this.run.units) lines.unshift(["device", this.run.units[spans.unit[i]][1]]);
    if (after >= 0) lines.push(["predecessor", `${this.title(after)}, ended ${formatTime(this.start[i] - this.end[after])} before`]);
    return [this.title(i), lines];
  },

  title(i) {
    const { spans, kinds, operands } = this.run, kind = kinds[spans.kind[i]];
    return `${kind} ${kind === "multiply" ? "" : operands[spans.operand[i]]}`.trim();
  },
});
