// Overlays: strokes, predicted classes with outlines, changes, and uncertainty.
//
// All but uncertainty share one NiiVue drawing layer with a colour table: 1 to K are strokes of the K classes, followed
// by K - 1 predicted classes, their K - 1 outlines, and one colour for changes. Strokes are always on top.

import { read } from "./viewer.js";

const MOST_COLOURS = 255;
const LARGE = 400; // image size in voxels per voxel of the smallest pen
const VISIBLE = 180; // image size in voxels per voxel of displayed stroke width: thinner lines are hard to see
const DOUBT = [255, 70, 200]; // distinct from grey and from the class colours
const UNDOUBTED = 60; // of 255: lower entropy is not shown
const DOUBTED_SHARE = 0.1; // maximum fraction of voxels coloured, so that an uncertain model does not hide the image

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

export class Layers {
  constructor(viewer) {
    this.viewer = viewer;
    this.strength = { stroke: 0.92, prediction: 0.25, difference: 0.8 };
    this.reset();
    const ramp = { R: [DOUBT[0], DOUBT[0]], G: [DOUBT[1], DOUBT[1]], B: [DOUBT[2], DOUBT[2]], A: [0, 255], I: [0, 255] };
    viewer.nv.addColormap("doubt", ramp);
  }

  // Remove all overlays.
  reset() {
    this.maps = {};
    this.under = this.labels = this.halo = this.doubt = null;
    this.changed = null;
    const { grid } = this.viewer;
    const per = (size) => (grid ? Math.max(1, Math.round(Math.min(grid.dims[0], grid.dims[1]) / size)) : 1);
    this.unit = per(LARGE);
    this.width = per(VISIBLE);
  }

  set classes(classes) {
    this.colours = classes.map((c) => rgb(c.colour));
    this.outlined = 3 * this.colours.length - 1 <= MOST_COLOURS;
    this.colour();
  }

  colour() {
    const c = this.colours, { stroke, prediction, difference } = this.strength, classes = c.slice(1);
    const outlines = this.outlined ? classes.map((v) => [...v, 255 * Math.min(1, 3 * prediction)]) : [];
    const fill = this.outlined ? prediction : Math.min(1, 1.6 * prediction);
    const table = [[0, 0, 0, 0], ...c.map((v) => [...v, 255 * stroke]), ...classes.map((v) => [...v, 255 * fill]), ...outlines, [255, 255, 255, 255 * difference]];
    const column = (i) => table.map((row) => row[i]);
    this.viewer.nv.setDrawColormap({ R: column(0), G: column(1), B: column(2), A: column(3), I: table.map((_, k) => k), labels: table.map(() => "") });
  }

  setStrength(kind, value) {
    this.strength[kind] = value;
    if (kind === "doubt" && this.viewer.flat) this.viewer.flat.setStrength(value);
    else if (kind === "doubt") {
      const index = this.viewer.nv.volumes.indexOf(this.doubt);
      if (index > 0) this.viewer.nv.setOpacity(index, value);
    } else this.colour();
  }

  // Strokes ----------------------------------------------------------------------------------------------------------
  setStrokes(labels) {
    const { grid, nv } = this.viewer;
    this.labels = labels;
    this.halo = this.width > 1 ? new Uint8Array(grid.size) : null;
    if (this.halo) grid.eachSet(labels, (i) => this.thicken(i));
    if (this.under) grid.toRas(labels.map((_, i) => this.value(i)), nv.drawBitmap);
    else {
      const draw = (i) => { nv.drawBitmap[grid.rasIndex(i)] = this.value(i); };
      nv.drawBitmap.fill(0);
      grid.eachSet(labels, draw);
      if (this.halo) grid.eachSet(this.halo, draw);
    }
    this.changed = "all";
    this.refresh();
  }

  value(i) { return this.labels[i] || this.halo?.[i] || this.under?.[i] || 0; }

  setVoxel(index) {
    const at = this.viewer.grid.rasIndex(index), [di, dj] = this.viewer.grid.ras;
    this.viewer.nv.drawBitmap[at] = this.value(index);
    if (this.changed === "all") return;
    const place = [at % di, Math.floor(at / di) % dj, Math.floor(at / (di * dj))];
    this.changed ??= { low: [...place], high: [...place] };
    for (let i = 0; i < 3; i++) {
      if (place[i] < this.changed.low[i]) this.changed.low[i] = place[i];
      if (place[i] > this.changed.high[i]) this.changed.high[i] = place[i];
    }
  }

  setVoxels(indices) {
    for (const index of indices) this.setVoxel(index);
    this.refresh();
  }

  // An edit has ended: recompute the halo around its voxels.
  settle(indices) {
    if (!this.halo || !indices.length) return;
    const { grid } = this.viewer, [nx, ny] = grid.dims, reach = this.width, boxes = new Map();
    for (const index of indices) {
      const [x, y, z] = grid.voxel(index), box = boxes.get(z) ?? [x, x, y, y];
      boxes.set(z, [Math.min(box[0], x), Math.max(box[1], x), Math.min(box[2], y), Math.max(box[3], y)]);
    }
    for (const [z, [x0, x1, y0, y1]] of boxes) {
      const inside = (visit, more) => {
        for (let y = Math.max(0, y0 - more); y <= Math.min(ny - 1, y1 + more); y++)
          for (let x = Math.max(0, x0 - more); x <= Math.min(nx - 1, x1 + more); x++) visit(grid.index([x, y, z]));
      };
      inside((i) => { this.halo[i] = 0; }, reach);
      inside((i) => { if (this.labels[i]) this.thicken(i); }, 2 * reach);
      inside((i) => this.setVoxel(i), reach);
    }
    this.refresh();
  }

  // Display thin strokes wider on large pictures, where a single voxel would be invisible.
  thicken(index) {
    const { grid } = this.viewer, [nx, ny] = grid.dims, [x, y] = grid.voxel(index), value = this.labels[index];
    const run = (step, from, to) => {
      let count = 1;
      for (let k = 1; k <= to && count < this.width && this.labels[index + k * step] === value; k++) count++;
      for (let k = 1; k <= from && count < this.width && this.labels[index - k * step] === value; k++) count++;
      return count;
    };
    if (run(1, x, nx - 1 - x) >= this.width && run(nx, y, ny - 1 - y) >= this.width) return;
    const before = Math.floor((this.width - 1) / 2), after = Math.floor(this.width / 2);
    for (let j = Math.max(-before, -y); j <= Math.min(after, ny - 1 - y); j++)
      for (let i = Math.max(-before, -x); i <= Math.min(after, nx - 1 - x); i++) this.halo[index + j * nx + i] ||= value;
  }

  refresh() { // at most once per frame
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (!this.viewer.nv.drawBitmap || !this.changed) return;
      this.send(this.changed);
      this.changed = null;
      this.viewer.nv.drawScene();
    });
  }

  // Upload only the changed box to the texture, so that drawing does not slow down with the size of the volume.
  send(box) {
    const { nv, grid, flat } = this.viewer, { gl } = nv;
    if (flat) { flat.draw(box); return; }
    if (box === "all") { nv.refreshDrawing(false); return; }
    const [low, size] = [box.low, box.high.map((v, i) => v - box.low[i] + 1)], [di, dj] = grid.ras;
    const options = [[gl.UNPACK_ROW_LENGTH, di], [gl.UNPACK_IMAGE_HEIGHT, dj], [gl.UNPACK_SKIP_PIXELS, low[0]], [gl.UNPACK_SKIP_ROWS, low[1]], [gl.UNPACK_SKIP_IMAGES, low[2]]];
    gl.activeTexture(gl.TEXTURE7);
    gl.bindTexture(gl.TEXTURE_3D, nv.drawTexture);
    for (const [option, value] of options) gl.pixelStorei(option, value);
    gl.texSubImage3D(gl.TEXTURE_3D, 0, ...low, ...size, gl.RED, gl.UNSIGNED_BYTE, nv.drawBitmap);
    for (const [option] of options) gl.pixelStorei(option, 0);
  }

  // Predictions ------------------------------------------------------------------------------------------------------
  // Show a label map in native order beneath the strokes; null removes it.
  setMap(kind, map) {
    this.maps[kind] = map;
    const { prediction, difference } = this.maps, k = this.colours.length, { grid } = this.viewer;
    this.under = null;
    if (prediction || difference) {
      this.under = new Uint8Array(grid.size);
      for (let i = 0; i < this.under.length; i++)
        if (difference?.[i]) this.under[i] = this.outlined ? 3 * k - 1 : 2 * k;
        else if (prediction?.[i]) this.under[i] = k + prediction[i];
      if (prediction && this.outlined) this.outline(prediction, k);
    }
    if (this.labels) this.setStrokes(this.labels);
  }

  // Mark the border of each class within its slice.
  outline(map, k) {
    const [nx, ny, nz] = this.viewer.grid.dims, { under } = this, width = Math.ceil(this.width / 2);
    for (let z = 0; z < nz; z++)
      for (let y = 0; y < ny; y++)
        for (let x = 0; x < nx; x++) {
          const i = x + nx * (y + ny * z), label = map[i];
          if (!label || under[i] !== k + label) continue;
          const other = (dx, dy) => x + dx < 0 || y + dy < 0 || x + dx >= nx || y + dy >= ny || map[i + dx + dy * nx] !== label;
          if (other(-width, 0) || other(width, 0) || other(0, -width) || other(0, width)) under[i] = 2 * k - 1 + label;
        }
  }

  // Show entropy as a glow over the image; null removes it. `map` is the content of `buffer`, one byte per voxel.
  async setDoubt(buffer, map, strength) {
    const { nv, flat } = this.viewer;
    if (this.doubt) nv.removeVolume(this.doubt);
    this.doubt = null;
    if (flat) { flat.setDoubt(buffer && map, buffer ? doubtRange(map) : [0, 1], strength, DOUBT); return; }
    if (!buffer) return;
    const [low, high] = doubtRange(map);
    const doubt = await read(buffer, "doubt", { colormap: "doubt", cal_min: low, cal_max: high, opacity: strength });
    this.doubt = doubt;
    nv.addVolume(doubt);
  }
}

// Display range: from the 90th percentile (at least UNDOUBTED) to the maximum.
export function doubtRange(map) {
  const counts = new Uint32Array(256);
  for (let i = 0; i < map.length; i++) counts[map[i]]++;
  let low = 255, above = 0;
  while (low > UNDOUBTED && above + counts[low] <= map.length * DOUBTED_SHARE) above += counts[low--];
  let high = 255;
  while (high > low + 1 && !counts[high]) high--;
  return [low, Math.max(high, low + 1)];
}
