// The Gantt chart of a run on a canvas: one line per lane, the causes of waits under the compute lane, an overview below.
// A run on several devices has a row per device, which shows what the device computed or waited for. The lanes of
// the device are shown if the row is open. A track is a lane of a device. The number of a track is the number of the
// device, times the number of lanes, plus the number of the lane.
const GUTTER = 84, AXIS = 24, ROW = 22, SIDE_BY_SIDE = 12, GAP = 6, WAITS = 10, OVERVIEW_LANE = 5;
// Height of a device's row, and maximum number of lanes in all for which all devices are open at first. At most MAX_OPEN
// devices are open, since the height of a canvas is limited.
const DEVICE = 14, OPEN_LANES = 20, MAX_OPEN = 8;

class Gantt {
  constructor(run, element, view, tip) {
    Object.assign(this, { run, view, tip, hovered: -1, open: [] });
    this.count = run.units ? run.units.length : 1;
    this.canvas = element.querySelector(".lanes");
    this.overview = element.querySelector(".overview");
    this.unpack();
    this.layOut();
    this.draw = oncePerFrame(() => this.paint());
    view.listeners.push(this.draw);
    this.listen();
    this.resize();
    new ResizeObserver(() => this.resize()).observe(element);
  }

  unpack() {
    const { spans, lanes } = this.run, n = spans.start.length;
    this.start = new Float64Array(n);
    this.end = new Float64Array(n);
    for (let i = 0, t = 0; i < n; i += 1) {
      t += spans.start[i];
      this.start[i] = t;
      this.end[i] = t + spans.length[i];
    }
    // Spans of one row never overlap, so their starts and ends are both in ascending order.
    this.rows = Array.from({ length: this.count * lanes.length }, () => []);
    for (let i = 0; i < n; i += 1) if (!spans.unit || spans.unit[i] >= 0) (this.rows[this.track(i)][spans.row[i]] ??= []).push(i);
    if (this.run.units && this.count * lanes.length <= OPEN_LANES) this.open = this.run.units.map((_, unit) => unit);
  }

  track(i) {
    const { lane, unit } = this.run.spans;
    return (unit ? unit[i] * this.run.lanes.length : 0) + lane[i];
  }

  layOut() {
    let y = AXIS;
    this.tops = [];
    this.deviceTops = [];
    const { lanes, units } = this.run;
    for (let unit = 0; unit < this.count; unit += 1) {
      if (units) { this.deviceTops.push(y); y += DEVICE + 2; }
      if (units && !this.open.includes(unit)) continue;
      lanes.forEach((lane, number) => {
        const track = unit * lanes.length + number, rows = this.rows[track];
        if (!rows.length) return;
        this.tops[track] = y;
        y += (rows.length === 1 ? ROW : rows.length * SIDE_BY_SIDE) + (units ? 3 : GAP);
        if (!units && lane === "compute") { this.waitsTop = y - 2; y += WAITS + GAP; }
      });
      if (units) y += GAP;
    }
    this.height = y;
    this.rowHeight = this.rows.map((rows) => (rows.length === 1 ? ROW : SIDE_BY_SIDE - 1));
  }

  resize() {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.parentElement.clientWidth;
    if (!width) return; // the page is hidden
    this.overviewRow = this.run.units ? Math.max(2, Math.min(OVERVIEW_LANE, Math.floor(120 / this.count))) : OVERVIEW_LANE;
    this.overviewHeight = (this.run.units ? this.count : this.run.lanes.length) * this.overviewRow + 6;
    const heights = [[this.canvas, this.height], [this.overview, this.overviewHeight]];
    for (const [canvas, height] of heights) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.width = width;
    this.small = null;
    this.paint();
  }

  x(t) { return GUTTER + ((t - this.view.from) / this.view.length) * (this.width - GUTTER); }
  time(x) { return this.view.from + ((x - GUTTER) / (this.width - GUTTER)) * this.view.length; }
  y(i) {
    return this.tops[this.track(i)] + this.run.spans.row[i] * SIDE_BY_SIDE;
  }

  paint() {
    const c = this.canvas.getContext("2d"), { lanes } = this.run;
    c.clearRect(0, 0, this.width, this.height);
    c.font = "11px system-ui, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif";
    c.textBaseline = "middle";
    this.paintAxis(c);
    this.tops.forEach((top, track) => {
      const lane = lanes[track % lanes.length], rows = this.rows[track], height = this.rowHeight[track];
      c.fillStyle = colour("track");
      rows.forEach((_, row) => c.fillRect(GUTTER, top + row * SIDE_BY_SIDE, this.width - GUTTER, height));
      c.fillStyle = colour(this.run.units ? "soft" : "ink");
      c.textAlign = "right";
      c.fillText(lane, GUTTER - 10, top + (height + (rows.length - 1) * SIDE_BY_SIDE) / 2 + 0.5);
      c.fillStyle = colour(lane);
      rows.forEach((indices, row) => this.paintRow(c, indices, top + row * SIDE_BY_SIDE, height));
    });
    this.paintDevices(c);
    this.paintWaits(c);
    if (this.hovered >= 0) this.paintHovered(c);
    this.paintOverview();
  }

  paintAxis(c) {
    const step = niceStep((this.view.length * 90) / (this.width - GUTTER));
    c.textAlign = "center";
    for (let t = Math.ceil(this.view.from / step) * step; t <= this.view.to; t += step) {
      const x = this.x(t);
      c.fillStyle = colour("rule");
      c.fillRect(Math.round(x), AXIS - 6, 1, this.height);
      c.fillStyle = colour("soft");
      const text = this.mark(t, step), half = c.measureText(text).width / 2;
      c.fillText(text, Math.min(Math.max(x, GUTTER + half), this.width - half - 1), 9);
    }
  }

  // Formats a time with enough digits that neighbouring marks on the axis have different texts.
  mark(t, step) {
    const [unit, name] = step >= 1e8 ? [1e9, "s"] : step >= 1e5 ? [1e6, "ms"] : [1e3, "µs"];
    return `${(t / unit).toFixed(Math.max(0, -Math.floor(Math.log10(step / unit) + 1e-9)))} ${name}`;
  }

  // Spans narrower than 1.5 pixels are merged per pixel column, so the width of the canvas bounds the drawing time.
  paintRow(c, indices, y, height) {
    const { from, to } = this.view, scale = (this.width - GUTTER) / this.view.length;
    let column = -1, covered = 0;
    const flush = () => {
      if (covered > 0) {
        c.globalAlpha = 0.25 + 0.75 * Math.min(1, covered);
        c.fillRect(column, y, 1, height);
      }
      covered = 0;
    };
    for (let at = this.firstEndingAfter(indices, from); at < indices.length; at += 1) {
      const i = indices[at];
      if (this.start[i] > to) break;
      const left = Math.max(GUTTER, GUTTER + (this.start[i] - from) * scale);
      const right = Math.min(this.width, GUTTER + (this.end[i] - from) * scale);
      if (right - left >= 1.5) {
        flush();
        c.globalAlpha = this.shade(i);
        c.fillRect(left, y, right - left - (right - left > 4 ? 1 : 0), height);
        if (right - left > 46 && height > 10) this.label(c, i, left, right, y + height / 2);
      } else {
        if (Math.floor(left) !== column) { flush(); column = Math.floor(left); }
        covered += right - left;
      }
    }
    flush();
    c.globalAlpha = 1;
  }

  firstEndingAfter(indices, t) {
    let low = 0, high = indices.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.end[indices[middle]] < t) low = middle + 1; else high = middle;
    }
    return low;
  }

  // Returns the opacity of span i. B and C are lighter than A, and every other tile's multiplications are lighter.
  shade(i) {
    const { operand, kind, tile } = this.run.spans;
    if (this.run.kinds[kind[i]] === "multiply") return tile[i] % 2 ? 0.78 : 1;
    return { A: 1, B: 0.66 }[this.run.operands[operand[i]]] ?? 0.85;
  }

  label(c, i, left, right, y) {
    const { spans, operands, kinds, tiles } = this.run, [row, column] = tiles[spans.tile[i]];
    const operand = operands[spans.operand[i]], step = spans.step[i];
    const text = kinds[spans.kind[i]] === "multiply" ? `${row},${column} · ${step}`
      : operand === "A" ? `A ${row} · ${step}` : operand === "B" ? `B ${column} · ${step}` : `C ${row},${column}`;
    if (c.measureText(text).width > right - left - 8) return;
    const fill = c.fillStyle;
    c.globalAlpha = 1;
    c.fillStyle = readableOn(colour(this.run.lanes[spans.lane[i]]), colour("track"), this.shade(i));
    c.textAlign = "left";
    c.fillText(text, left + 4, y + 0.5);
    c.fillStyle = fill;
  }

  paintDevices(c) {
    (this.run.units ?? []).forEach(([name], unit) => {
      const top = this.deviceTops[unit], open = this.open.includes(unit);
      c.textAlign = "right";
      c.fillStyle = colour("ink");
      const mark = this.start.length ? (open ? "\u25be " : "\u25b8 ") : "";
      c.fillText(mark + name, GUTTER - 10, top + DEVICE / 2 + 0.5, GUTTER - 12);
      this.paintCauses(c, this.run.activity[unit], top, DEVICE, true);
    });
  }

  paintWaits(c) {
    if (this.waitsTop === undefined) return;
    c.textAlign = "right";
    c.fillStyle = colour("soft");
    c.fillText("waits for", GUTTER - 10, this.waitsTop + WAITS / 2);
    this.paintCauses(c, this.run.waits, this.waitsTop, WAITS, false);
  }

  // Paints times with their causes, a list of [start, length, cause] in ascending order, as a bar of this height.
  // A column of pixels with several causes is divided by their shares. The ends of long times are drawn on parts of a
  // pixel, unless the times are `dense`, without gaps between them: then their columns are divided too.
  paintCauses(c, causes, top, height, dense) {
    const fills = this.run.causes.map((name) => colour(name === "accumulator" ? "d2h" : name));
    const shares = fills.map(() => 0);
    let column = -1;
    const flush = () => {
      let y = top + height;
      shares.forEach((share, cause) => {
        shares[cause] = 0;
        if (share < 0.01) return;
        c.fillStyle = fills[cause];
        c.fillRect(column, (y -= share * height), 1, share * height);
      });
    };
    for (const [start, length, cause] of causes) {
      if (start > this.view.to) break;
      if (start + length < this.view.from) continue;
      const right = Math.min(this.width, this.x(start + length));
      for (let left = Math.max(GUTTER, this.x(start)); left < right; ) {
        const whole = Math.floor(left), long = right - left >= 1 && (!dense || left === whole);
        const next = long ? (dense ? Math.floor(right) : right) : Math.min(right, whole + 1);
        if (whole !== column) { flush(); column = whole; }
        if (!long) shares[cause] += next - left;
        else { c.fillStyle = fills[cause]; c.fillRect(left, top, next - left, height); }
        left = next;
      }
    }
    flush();
  }

  paintHovered(c) {
    const after = this.blocker(this.hovered);
    c.strokeStyle = colour("ink");
    c.lineWidth = 1.5;
    for (const i of after < 0 ? [this.hovered] : [after, this.hovered]) {
      const left = Math.max(GUTTER, this.x(this.start[i])), right = Math.min(this.width - 1, this.x(this.end[i]));
      const height = this.rowHeight[this.track(i)];
      if (right >= GUTTER) c.strokeRect(left, this.y(i), Math.max(2, right - left), height);
    }
    if (after < 0) return;
    const middle = (i) => this.y(i) + this.rowHeight[this.track(i)] / 2;
    c.beginPath();
    c.setLineDash([3, 2]);
    c.moveTo(Math.max(GUTTER, this.x(this.end[after])), middle(after));
    c.lineTo(Math.max(GUTTER, this.x(this.start[this.hovered])), middle(this.hovered));
    c.stroke();
    c.setLineDash([]);
  }

  blocker(i) {
    const back = this.run.spans.after[i];
    return back > 0 ? i - back : -1;
  }

  paintOverview() {
    const c = this.overview.getContext("2d"), height = this.overviewHeight;
    this.small ??= this.smallPicture();
    c.clearRect(0, 0, this.width, height);
    c.drawImage(this.small, 0, 0, this.width, height);
    const scale = (this.width - GUTTER) / this.view.whole;
    const left = GUTTER + this.view.from * scale, right = GUTTER + this.view.to * scale;
    c.fillStyle = colour("card");
    c.globalAlpha = 0.65;
    c.fillRect(GUTTER, 0, left - GUTTER, height);
    c.fillRect(right, 0, this.width - right, height);
    c.globalAlpha = 1;
    c.strokeStyle = colour("accent");
    c.lineWidth = 1.5;
    c.strokeRect(left + 0.75, 0.75, Math.max(3, right - left - 1.5), height - 1.5);
  }

  smallPicture() {
    const picture = document.createElement("canvas");
    picture.width = this.overview.width;
    picture.height = this.overview.height;
    const c = picture.getContext("2d"), shown = this.view;
    c.setTransform(this.overview.getContext("2d").getTransform());
    this.view = { from: 0, to: shown.whole, length: shown.whole };
    const high = this.overviewRow - 1;
    const top = (number) => 3 + number * this.overviewRow;
    if (this.run.units) this.run.activity.forEach((did, unit) => this.paintCauses(c, did, top(unit), high, true));
    else this.run.lanes.forEach((lane, number) => {
      c.fillStyle = colour(lane);
      for (const indices of this.rows[number]) this.paintRow(c, indices, 3 + number * OVERVIEW_LANE, OVERVIEW_LANE - 1);
    });
    this.view = shown;
    return picture;
  }

  recolour() { this.small = null; this.paint(); }

  // Returns the index of the span within two pixels of a point, or -1.
  spanAt(x, y) {
    if (x < GUTTER) return -1;
    for (let track = 0; track < this.tops.length; track += 1) {
      for (let row = 0; this.tops[track] !== undefined && row < this.rows[track].length; row += 1) {
        const top = this.tops[track] + row * SIDE_BY_SIDE;
        if (y < top || y >= top + this.rowHeight[track]) continue;
        const indices = this.rows[track][row], t = this.time(x), near = (2 * this.view.length) / this.width;
        const i = indices[this.firstEndingAfter(indices, t - near)];
        return i !== undefined && this.start[i] <= t + near ? i : -1;
      }
    }
    return -1;
  }

  // Returns the wait at a point, or what a device did there, as [start, length, cause]; null if there is none.
  waitAt(x, y) {
    const unit = this.unitAt(y), top = unit < 0 ? this.waitsTop : this.deviceTops[unit];
    if (top === undefined || x < GUTTER || y < top || y >= top + (unit < 0 ? WAITS : DEVICE)) return null;
    const t = this.time(x), causes = unit < 0 ? this.run.waits : this.run.activity[unit];
    return causes.find(([start, length]) => start <= t && t < start + length) ?? null;
  }

  // Returns the number of the device whose row is at this height, or -1.
  unitAt(y) { return this.deviceTops.findIndex((top) => y >= top && y < top + DEVICE + 2); }

  // Opens or closes the lanes of a device.
  toggle(unit, open = !this.open.includes(unit)) {
    if (!this.start.length) return;
    this.open = this.open.filter((other) => other !== unit);
    if (open) this.open.push(unit);
    if (this.count * this.run.lanes.length > OPEN_LANES) this.open = this.open.slice(-MAX_OPEN);
    this.hovered = -1;
    this.layOut();
    this.resize();
  }
}
