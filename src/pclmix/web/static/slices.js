// The strip of slices beside the image: current slice, classes drawn, and uncertainty per slice.

export class SliceStrip {
  constructor(canvas, classes, go) {
    Object.assign(this, { canvas, classes, go });
    this.count = 0;
    this.current = 0;
    this.drawn = [];
    this.unsure = null;
    const pick = (event) => {
      if (!this.count) return;
      const box = canvas.getBoundingClientRect();
      this.go(Math.max(0, Math.min(this.count - 1, Math.floor(((event.clientY - box.top) / box.height) * this.count))));
    };
    canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); pick(e); });
    canvas.addEventListener("pointermove", (e) => { if (e.buttons) pick(e); });
    canvas.addEventListener("wheel", (e) => { e.preventDefault(); this.go(this.current + Math.sign(e.deltaY)); }, { passive: false });
    new ResizeObserver(() => this.render()).observe(canvas);
  }

  // Count the voxels per class, in all slices or in one.
  measure(labels, plane, count) {
    this.plane = plane;
    this.count = count;
    this.drawn = Array.from({ length: count }, (_, z) => this.classesOf(labels, z));
    this.render();
  }

  update(labels, z) { this.drawn[z] = this.classesOf(labels, z); }

  classesOf(labels, z) {
    const found = new Uint32Array(this.classes.length + 1), words = new Uint32Array(labels.buffer, 0, labels.length >> 2);
    const end = (z + 1) * this.plane;
    for (let i = z * this.plane; i < end;)
      if (i % 4 === 0 && i + 4 <= end && !words[i / 4]) i += 4; // strokes are sparse
      else found[labels[i++]]++;
    return found;
  }

  show(z) {
    this.current = z;
    this.canvas.setAttribute("aria-valuenow", String(z + 1));
    this.canvas.setAttribute("aria-valuemin", "1");
    this.canvas.setAttribute("aria-valuemax", String(this.count));
    this.canvas.setAttribute("aria-valuetext", `Slice ${z + 1} of ${this.count}`);
    this.render();
  }

  render() {
    if (this.canvas.hidden) return;
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const [raised, chosen, text, faint, accent, warn] = ["raised", "chosen", "text", "faint", "accent", "warn"].map(colour);
    const dpr = devicePixelRatio || 1, w = this.canvas.clientWidth, h = this.canvas.clientHeight;
    this.canvas.width = w * dpr;
    this.canvas.height = h * dpr;
    const g = this.canvas.getContext("2d", { willReadFrequently: true }); // CPU rendering: no wait for shaders
    g.scale(dpr, dpr);
    if (!this.count) return;
    const cell = h / this.count, gap = cell > 8 ? 2 : 0, most = Math.max(...(this.unsure ?? [0])), least = Math.min(...(this.unsure ?? [0]));
    g.font = "12px system-ui, sans-serif";
    g.textBaseline = "middle";
    g.strokeStyle = faint;
    g.lineWidth = 0.75;
    for (let z = 0; z < this.count; z++) {
      const y = z * cell;
      g.fillStyle = z === this.current ? chosen : raised;
      g.fillRect(4, y + gap / 2, w - 8, cell - gap);
      if (this.unsure?.length === this.count) {
        g.globalAlpha = 0.1 + 0.9 * ((this.unsure[z] - least) / Math.max(0.01, most - least));
        g.fillStyle = warn;
        g.fillRect(w - 9, y + gap / 2, 5, cell - gap);
        g.globalAlpha = 1;
      }
      const present = this.classes.map((c, k) => [c.colour, this.drawn[z]?.[k + 1] ?? 0]).filter(([, n]) => n);
      const bar = Math.min(6, 26 / Math.max(1, present.length));
      present.forEach(([own], i) => {
        g.fillStyle = own;
        if (cell > 14) {
          g.beginPath();
          g.arc(w - 31 + (i % 3) * 8, y + cell / 2 + (Math.floor(i / 3) - (present.length > 3 ? 0.5 : 0)) * 8, 3, 0, 7);
          g.fill();
          g.stroke(); // light colours on a light panel
        }
        else g.fillRect(w - 38 + i * bar, y + gap / 2, bar - 1, Math.max(1, cell - gap));
      });
    }
    g.strokeStyle = accent;
    g.lineWidth = 2;
    g.strokeRect(3, this.current * cell + gap / 2, w - 6, Math.max(3, cell - gap));
    // Numbers last: where cells are lower than the text, the next cell or the frame would cover it.
    const every = Math.ceil(16 / cell), place = (z) => Math.min(h - 8, Math.max(8, (z + 0.5) * cell)), own = place(this.current);
    for (let z = 0; z < this.count; z++)
      if (z % every === 0 && z !== this.current && Math.abs(place(z) - own) > 15) {
        g.fillStyle = faint;
        g.fillText(String(z + 1), 7, place(z));
      }
    const number = String(this.current + 1);
    g.fillStyle = chosen;
    if (cell < 16) g.fillRect(4, own - 8, g.measureText(number).width + 6, 16);
    g.fillStyle = text;
    g.fillText(number, 7, own);
  }
}
