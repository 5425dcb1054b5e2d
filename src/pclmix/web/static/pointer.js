// Mouse, finger and pen on the image. The left button, a finger or the pen draws; two fingers zoom and move; the right
// button changes brightness and contrast; the middle button, or the space bar held down, moves the image; a click with
// Shift takes over a part of the prediction.

const PEN_REST = 2000; // milliseconds for which a finger beside a pen counts as the resting hand

export class Pointer {
  constructor(canvas, brush, viewer, actions) {
    Object.assign(this, { canvas, brush, viewer, actions });
    this.fingers = new Map();
    this.mode = null;
    this.penSeen = -Infinity;
    this.space = false;
    this.size = 3;
    canvas.addEventListener("pointerdown", (e) => this.down(e));
    canvas.addEventListener("pointermove", (e) => this.move(e));
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (e) => this.up(e));
    canvas.addEventListener("pointerleave", () => { brush.hidden = true; });
    canvas.addEventListener("contextmenu", (e) => e.preventDefault());
    canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    this.rolled = 0;
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  down(event) {
    if (!this.viewer.grid) return;
    event.preventDefault();
    this.canvas.focus?.();
    if (event.pointerType === "pen") this.penSeen = event.timeStamp;
    if (event.pointerType === "touch") {
      this.fingers.set(event.pointerId, this.at(event));
      if (this.fingers.size === 2) { this.stopDrawing(true); this.mode = "pinch"; this.pinch = this.spread(); return; }
      if (event.timeStamp - this.penSeen < PEN_REST) return;
    }
    if (this.mode) return;
    if (event.button === 0 && event.shiftKey) {
      const point = this.viewer.planePoint(...this.at(event));
      if (point) this.actions.take(point);
      return;
    }
    const draws = (event.button === 0 || event.button === 5) && !this.space;
    if (draws && !this.actions.drawing()) return; // another case is being opened
    try { this.canvas.setPointerCapture(event.pointerId); } catch { /* the pointer is gone already */ }
    this.last = this.at(event);
    if (event.button === 1 || this.space) this.mode = "pan";
    else if (event.button === 2) this.mode = "window";
    else if (draws) {
      this.mode = "draw";
      this.erasing = event.button === 5 || (event.buttons & 32) !== 0; // the other end of a pen
      this.actions.begin(this.erasing);
      this.point = this.viewer.planePoint(...this.last);
      this.stamp(this.point, this.point);
    }
    this.canvas.classList.toggle("moving", this.mode === "pan");
  }

  move(event) {
    if (this.fingers.has(event.pointerId)) this.fingers.set(event.pointerId, this.at(event));
    this.showBrush(event);
    if (this.mode === "pinch") { this.pinchMove(); return; }
    if (!this.mode) return;
    if (this.mode === "draw") {
      const points = event.getCoalescedEvents?.() ?? [];
      for (const each of points.length ? points : [event]) {
        const point = this.viewer.planePoint(...this.at(each));
        if (point && this.point) this.stamp(this.point, point);
        this.point = point;
      }
      return;
    }
    const [x, y] = this.at(event), [dx, dy] = [x - this.last[0], y - this.last[1]];
    this.last = [x, y];
    if (this.mode === "pan") this.viewer.pan(dx, dy, x, y);
    else this.actions.window(dx, dy);
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

  // A disc of the pen's size along the line between two points, in half-voxel steps.
  stamp(from, to) {
    const steps = Math.max(1, Math.ceil(Math.hypot(to[0] - from[0], to[1] - from[1]) * 2));
    const radius = this.size / 2, reach = Math.floor(radius), found = new Set();
    for (let s = 0; s <= steps; s++) {
      const u = from[0] + ((to[0] - from[0]) * s) / steps, v = from[1] + ((to[1] - from[1]) * s) / steps;
      const cu = Math.floor(u), cv = Math.floor(v);
      for (let i = -reach; i <= reach; i++)
        for (let j = -reach; j <= reach; j++)
          if (i * i + j * j <= radius * radius) found.add(this.viewer.voxelAt(cu + i, cv + j));
    }
    found.delete(-1);
    this.actions.paint([...found]);
  }

  showBrush(event) {
    const drawing = event.pointerType !== "touch" && !this.space && this.viewer.grid && this.actions.drawing();
    this.canvas.classList.toggle("drawing", Boolean(drawing) && this.mode !== "pan");
    this.brush.hidden = !drawing;
    if (!drawing) return;
    const size = this.viewer.screen(0, 0)?.size;
    if (!size) return;
    const [x, y] = this.at(event);
    const [w, h] = size.map((s) => Math.max(6, s * this.size));
    Object.assign(this.brush.style, {
      width: `${w}px`, height: `${h}px`, transform: `translate(${x - w / 2}px, ${y - h / 2}px)`,
      borderColor: this.actions.colour(),
    });
  }

  wheel(event) {
    event.preventDefault();
    if (!this.viewer.grid) return;
    if (event.ctrlKey || event.metaKey) { this.viewer.zoom(Math.exp(-event.deltaY / 200), ...this.at(event)); return; }
    this.rolled += event.deltaMode === 0 ? event.deltaY / 60 : event.deltaY;
    const whole = Math.trunc(Math.abs(event.deltaY) >= 60 ? Math.sign(event.deltaY) : this.rolled);
    if (whole) { this.rolled = 0; this.actions.scroll(whole); }
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
