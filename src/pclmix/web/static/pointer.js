// Mouse, touch, pen and keyboard input on the image. Left button, finger or pen: draw. Two fingers: zoom and pan. Right
// button: window and level. Middle button or Space: pan. Shift + click: accept a region of the prediction. Alt, or the
// tool "Crosshair": move the crosshair.

const PEN_REST = 2000; // ms after pen input during which touches are ignored (palm rejection)
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [1, -1], ArrowDown: [1, 1] }; // screen axis, direction

export class Pointer {
  constructor(canvas, brush, viewer, actions) {
    Object.assign(this, { canvas, brush, viewer, actions });
    this.fingers = new Map();
    this.mode = null;
    this.penSeen = -Infinity;
    this.space = false;
    this.size = 3;
    this.keyboard = false; // whether the crosshair is controlled by keys
    canvas.addEventListener("pointerdown", (e) => this.down(e));
    canvas.addEventListener("pointermove", (e) => this.move(e));
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (e) => this.up(e));
    canvas.addEventListener("pointerleave", () => { brush.hidden = true; this.hovered = null; actions.hover(null); });
    canvas.addEventListener("contextmenu", (e) => e.preventDefault());
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    canvas.addEventListener("blur", () => this.endKeys());
    // A stroke ends where the image moves under the pointer, as when a notice appears above it.
    new ResizeObserver(() => { if (this.mode === "draw") this.stopDrawing(false); }).observe(canvas);
    this.rolled = 0;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  down(event) {
    if (!this.viewer.grid) return;
    event.preventDefault();
    this.endKeys();
    this.canvas.focus({ preventScroll: true });
    if (event.pointerType === "pen") this.penSeen = event.timeStamp;
    if (event.pointerType === "touch") {
      this.fingers.set(event.pointerId, this.at(event));
      if (this.fingers.size === 2) { this.stopDrawing(true); this.mode = "pinch"; this.pinch = this.spread(); return; }
      if (event.timeStamp - this.penSeen < PEN_REST) return;
    }
    if (this.mode) return;
    const [x, y] = this.at(event), plane = this.viewer.at(x, y);
    if (event.button === 0 && event.shiftKey) {
      if (plane) this.actions.take(plane.index(plane.point(x, y)));
      return;
    }
    const primary = (event.button === 0 || event.button === 5) && !this.space, looks = primary && (event.altKey || this.actions.looking());
    const draws = primary && !looks;
    if (!plane || (draws && !this.actions.drawing())) return; // another case is loading
    try { this.canvas.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
    this.last = [x, y];
    this.plane = plane; // a drag stays in the plane it started in
    if (event.button === 1 || this.space) this.mode = "pan";
    else if (event.button === 2) this.mode = "window";
    else if (looks) { this.mode = "look"; this.look(x, y); }
    else if (draws) {
      this.mode = "draw";
      this.erasing = event.button === 5 || (event.buttons & 32) !== 0; // eraser end of a pen
      this.actions.begin(this.erasing);
      this.point = plane.point(x, y);
      this.stamp(plane, this.point, this.point);
    }
    this.canvas.classList.toggle("moving", this.mode === "pan");
  }

  move(event) {
    if (this.fingers.has(event.pointerId)) this.fingers.set(event.pointerId, this.at(event));
    this.keyboard = false;
    this.hovered = this.at(event);
    this.showBrush(event);
    if (this.mode === "pinch") { this.pinchMove(); return; }
    if (this.mode === "draw") {
      const points = event.getCoalescedEvents?.() ?? [];
      for (const each of points.length ? points : [event]) {
        const point = this.plane.point(...this.at(each));
        this.stamp(this.plane, this.point, point);
        this.point = point;
      }
    } else if (this.mode) {
      const [x, y] = this.hovered, [dx, dy] = [x - this.last[0], y - this.last[1]];
      this.last = [x, y];
      if (this.mode === "pan") this.viewer.pan(dx, dy, x, y);
      else if (this.mode === "look") this.look(x, y);
      else this.actions.window(dx, dy);
    }
    this.actions.hover(event.pointerType === "touch" ? null : this.hovered);
  }

  up(event) {
    this.fingers.delete(event.pointerId);
    if (this.mode === "pinch" && this.fingers.size) return;
    if (this.mode === "draw") this.stopDrawing(event.type === "pointercancel");
    this.mode = null;
    this.canvas.classList.remove("moving");
  }

  stopDrawing(undone) {
    if (this.mode === "draw") this.actions.end(undone);
    this.mode = null;
  }

  look(x, y) {
    const plane = this.viewer.at(x, y), index = plane ? plane.index(plane.point(x, y)) : -1;
    if (index >= 0) this.actions.look(index);
  }

  // Pen diameter in mm: `size` voxels of the native plane, scaled up on large pictures.
  get across() {
    const { grid, spacing, layers } = this.viewer;
    return this.size * layers.unit * Math.min(...grid.plane().map((axis) => spacing[axis]));
  }

  // Paint a disc along the line between two points of a plane, in half-voxel steps.
  stamp(plane, from, to) {
    const steps = Math.max(1, Math.ceil(Math.hypot(to[0] - from[0], to[1] - from[1]) * 2)), found = new Set();
    const [su, sv] = plane.axes.map(({ axis }) => this.viewer.spacing[axis]), radius = this.across / 2 + 1e-6;
    const [ru, rv] = [Math.floor(radius / su), Math.floor(radius / sv)], disc = [];
    for (let i = -ru; i <= ru; i++)
      for (let j = -rv; j <= rv; j++) if ((i * su) ** 2 + (j * sv) ** 2 <= radius * radius) disc.push([i, j]);
    for (let s = 0; s <= steps; s++) {
      const u = from[0] + ((to[0] - from[0]) * s) / steps, v = from[1] + ((to[1] - from[1]) * s) / steps;
      for (const [i, j] of disc) found.add(plane.index([u + i, v + j]));
    }
    found.delete(-1);
    this.actions.paint([...found]);
  }

  // Keys -----------------------------------------------------------------------------------------------------------
  // Shift + arrows move the crosshair; Enter starts and ends drawing. Returns whether the key was handled.
  key(event) {
    const plane = this.viewer.tiles[0], arrow = ARROWS[event.key];
    if (!plane) return false;
    if (event.key === "Enter") {
      if (this.mode === "keys") { this.endKeys(); return true; }
      if (this.mode || !this.actions.drawing() || this.actions.looking()) return false;
      this.mode = "keys";
      this.keyboard = true;
      this.actions.begin(false);
      this.point = this.keyPoint(plane);
      this.stamp(plane, this.point, this.point);
      return true;
    }
    if (!arrow || !event.shiftKey) return false;
    this.keyboard = true;
    const { axis, scale } = plane.axes.find(({ across }) => across === arrow[0]), { grid, cross } = this.viewer;
    const next = [...cross], native = grid.axis[axis], forward = arrow[1] * Math.sign(scale) * (grid.reversed[axis] ? -1 : 1);
    next[native] = Math.max(0, Math.min(grid.dims[native] - 1, cross[native] + forward * Math.max(1, Math.floor(this.size / 2) * this.viewer.layers.unit)));
    this.actions.look(grid.index(next));
    if (this.mode === "keys") {
      const shown = this.viewer.tiles[0], point = this.keyPoint(shown);
      this.stamp(shown, this.point, point);
      this.point = point;
    }
    return true;
  }

  keyPoint(plane) { return plane.axes.map(({ axis }) => this.viewer.grid.along(axis, this.viewer.cross) + 0.5); }

  endKeys() {
    if (this.mode !== "keys") return;
    this.mode = null;
    this.actions.end(false);
  }

  zoomHere(factor) {
    const [left, top, width, height] = this.viewer.tiles[0]?.box ?? [0, 0, 0, 0];
    this.viewer.zoom(factor, ...(this.hovered ?? [left + width / 2, top + height / 2]));
  }

  // ----------------------------------------------------------------------------------------------------------------
  showBrush(event) {
    const plane = this.mode === "draw" ? this.plane : this.viewer.at(...this.at(event));
    const drawing = event.pointerType !== "touch" && !this.space && !event.altKey && plane && this.actions.drawing() && !this.actions.looking();
    this.canvas.classList.toggle("drawing", Boolean(drawing) && this.mode !== "pan");
    this.brush.hidden = !drawing;
    if (!drawing) return;
    const [x, y] = this.at(event), size = { 0: 0, 1: 0 };
    for (const [i, pixels] of plane.pixels.entries()) {
      const { axis, across } = plane.axes[i];
      size[across] = Math.max(6, (pixels * this.across) / this.viewer.spacing[axis]);
    }
    Object.assign(this.brush.style, {
      width: `${size[0]}px`, height: `${size[1]}px`, transform: `translate(${x - size[0] / 2}px, ${y - size[1] / 2}px)`,
      borderColor: this.actions.colour(),
    });
  }

  wheel(event) {
    event.preventDefault();
    if (!this.viewer.grid) return;
    const at = this.at(event), plane = this.viewer.at(...at);
    if (event.ctrlKey || event.metaKey) { this.viewer.zoom(Math.exp(-event.deltaY / 200), ...at); return; }
    this.rolled += event.deltaMode === 0 ? event.deltaY / 60 : event.deltaY;
    const whole = Math.trunc(Math.abs(event.deltaY) >= 60 ? Math.sign(event.deltaY) : this.rolled);
    if (whole && plane) { this.rolled = 0; this.actions.scroll(plane.depth, whole); }
  }

  spread() {
    const [a, b] = [...this.fingers.values()];
    return { centre: [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2], distance: Math.max(10, Math.hypot(a[0] - b[0], a[1] - b[1])) };
  }

  pinchMove() {
    if (this.fingers.size < 2) return;
    const now = this.spread(), [x, y] = now.centre;
    this.viewer.zoom(now.distance / this.pinch.distance, x, y);
    this.viewer.pan(x - this.pinch.centre[0], y - this.pinch.centre[1], x, y);
    this.pinch = now;
  }
}
