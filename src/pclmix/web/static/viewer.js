// NiiVue, reduced to what the workbench needs: one slice of one volume, overlays, and voxels under the pointer.

import { Niivue, NVImage, SLICE_TYPE } from "./vendor/niivue.js";
import { Grid } from "./grid.js";

const TYPE_OF_AXIS = [SLICE_TYPE.SAGITTAL, SLICE_TYPE.CORONAL, SLICE_TYPE.AXIAL];
const SURE = 60; // of 255: below this doubt is not shown

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

export class Viewer {
  constructor(canvas) {
    this.canvas = canvas;
    this.nv = new Niivue({
      interactive: false, dragAndDropEnabled: false, isOrientationTextVisible: true, crosshairWidth: 0,
      backColor: [0, 0, 0, 1], fontColor: [0.55, 0.6, 0.66, 1], fontMinPx: 12, fontSizeScaling: 0.3,
      loadingText: "", logLevel: "error", isRadiologicalConvention: true, sliceType: SLICE_TYPE.AXIAL,
      isColorbar: false, show3Dcrosshair: false, isResizeCanvas: true,
    });
    this.grid = null;
    this.slice = 0;
    this.maps = {};
    this.strength = { stroke: 0.92, prediction: 0.42, difference: 0.8 };
    this.moved = () => {};
    this.waiting = false;
  }

  async start() {
    await this.nv.attachToCanvas(this.canvas, false);
    this.nv.drawOpacity = 1;
    new ResizeObserver(() => { this.moved(); }).observe(this.canvas);
  }

  set classes(classes) {
    this.colours = classes.map((c) => rgb(c.colour));
    this.colourStrokes();
  }

  async load(buffer) {
    const volume = await read(buffer, "image", { colormap: "gray" });
    this.nv.volumes = [];
    this.nv.drawBitmap = null;
    this.nv.addVolume(volume);
    this.doubt = null;
    this.maps = {};
    this.under = null;
    this.grid = new Grid(volume.hdr.dims.slice(1, 4).map((n) => Math.max(1, n)), volume.permRAS);
    this.window = [volume.cal_min, volume.cal_max];
    this.nv.opts.sliceType = TYPE_OF_AXIS[this.grid.depth];
    this.nv.scene.pan2Dxyzmm = [0, 0, 0, 1];
    this.nv.setDrawingEnabled(true);
    this.show(Math.floor(this.grid.slices / 2));
  }

  // Strokes, and label maps beneath them -------------------------------------------------------------------------
  // All are one layer of the viewer: 1 to K are strokes of the K classes, K + 1 to 2K - 1 predicted classes without
  // the background, 2K a change. So a stroke is always on top of what was predicted there.
  colourStrokes() {
    const c = this.colours, { stroke, prediction, difference } = this.strength;
    const table = [[0, 0, 0, 0], ...c.map((v) => [...v, 255 * stroke]), ...c.slice(1).map((v) => [...v, 255 * prediction]), [255, 255, 255, 255 * difference]];
    const column = (i) => table.map((row) => row[i]);
    this.nv.setDrawColormap({ R: column(0), G: column(1), B: column(2), A: column(3), I: table.map((_, k) => k), labels: table.map(() => "") });
  }

  setStrength(kind, value) {
    this.strength[kind] = value;
    this.colourStrokes();
  }

  setStrokes(labels) {
    this.labels = labels;
    const { under } = this;
    const shown = under ? labels.map((v, i) => v || under[i]) : labels;
    this.grid.toRas(shown, this.nv.drawBitmap);
    this.refresh();
  }

  setVoxels(indices, values) {
    for (let i = 0; i < indices.length; i++) this.setVoxel(indices[i], values[i]);
    this.refresh();
  }

  setVoxel(index, value) { this.nv.drawBitmap[this.grid.rasIndex(index)] = value || (this.under ? this.under[index] : 0); }

  refresh() { // at most once a frame
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      if (this.nv.drawBitmap) this.nv.refreshDrawing(true);
    });
  }

  // A label map in native order to show beneath the strokes, or null to remove it.
  setMap(kind, map) {
    this.maps[kind] = map;
    const { prediction, difference } = this.maps, k = this.colours.length;
    this.under = null;
    if (prediction || difference) {
      this.under = new Uint8Array(this.grid.size);
      for (let i = 0; i < this.under.length; i++)
        if (difference?.[i]) this.under[i] = 2 * k;
        else if (prediction?.[i]) this.under[i] = k + prediction[i];
    }
    if (this.labels) this.setStrokes(this.labels);
  }

  // Doubt as a glow over the image, or null to remove it.
  async setDoubt(buffer, strength) {
    if (this.doubt) this.nv.removeVolume(this.doubt);
    this.doubt = buffer && await read(buffer, "doubt", { colormap: "inferno", cal_min: SURE, cal_max: 255, opacity: strength });
    if (this.doubt) this.nv.addVolume(this.doubt);
  }

  setDoubtStrength(value) {
    const index = this.nv.volumes.indexOf(this.doubt);
    if (index > 0) this.nv.setOpacity(index, value);
  }

  // Where one looks ----------------------------------------------------------------------------------------------
  show(slice) {
    this.slice = Math.max(0, Math.min(this.grid.slices - 1, slice));
    const vox = this.grid.rasVoxel(Math.floor(this.grid.dims[0] / 2), Math.floor(this.grid.dims[1] / 2), this.slice);
    const frac = vox.map((v, i) => (v + 0.5) / this.grid.ras[i]);
    this.nv.scene.crosshairPos = frac;
    this.nv.drawScene();
    this.moved();
  }

  redraw() { this.nv.drawScene(); this.moved(); }

  set radiological(value) { this.nv.opts.isRadiologicalConvention = value; this.redraw(); }

  fit() { this.nv.setPan2Dxyzmm([0, 0, 0, 1]); this.moved(); }

  // Zoom by a factor; the voxel under the pointer stays there.
  zoom(factor, x, y) {
    const pan = [...this.nv.scene.pan2Dxyzmm];
    const before = this.fraction(x, y);
    pan[3] = Math.max(1, Math.min(20, pan[3] * factor));
    if (pan[3] === 1) { this.fit(); return; }
    this.nv.setPan2Dxyzmm(pan);
    const after = this.fraction(x, y);
    if (before && after) this.shift(before, after);
    this.moved();
  }

  pan(dx, dy, x, y) {
    const before = this.fraction(x - dx, y - dy), after = this.fraction(x, y);
    if (before && after) this.shift(before, after);
    this.moved();
  }

  shift(before, after) { // move the scene so that what was at `after` comes to lie at `before`'s place
    const a = this.nv.frac2mm(before), b = this.nv.frac2mm(after);
    const pan = [...this.nv.scene.pan2Dxyzmm];
    for (let i = 0; i < 3; i++) pan[i] += (b[i] - a[i]) * pan[3]; // the viewer moves first and zooms then
    this.nv.setPan2Dxyzmm(pan);
  }

  setWindow(low, high) {
    const volume = this.nv.volumes[0];
    if (!volume || !(high > low)) return;
    volume.cal_min = low;
    volume.cal_max = high;
    this.nv.updateGLVolume();
  }

  // Pointer and voxels -------------------------------------------------------------------------------------------
  // Texture coordinates under a point of the canvas (CSS pixels), also beyond the image's edge.
  fraction(x, y) {
    const line = this.lines();
    if (!line) return null;
    const dpr = this.nv.uiData.dpr || 1;
    const at = [0.5, 0.5, 0.5];
    at[this.grid.depth] = this.nv.scene.crosshairPos[this.grid.depth];
    for (const { axis, across, scale, offset } of line) at[axis] = (across === 0 ? x : y) * dpr * scale + offset;
    return at;
  }

  // The slice on screen is an axis-aligned picture: each in-plane axis is a line along x or y of the canvas.
  lines() {
    const tile = this.nv.screenSlices?.[0];
    if (!tile || !this.grid) return null;
    let [left, top, width, height] = tile.leftTopWidthHeight;
    if (width < 0) { left += width; width = -width; }
    const at = (fx, fy) => this.nv.screenXY2TextureFrac(left + fx * width, top + fy * height, 0, false);
    const a = at(0.25, 0.25), b = at(0.75, 0.25), c = at(0.25, 0.75);
    return this.grid.plane.map((axis) => {
      const alongX = Math.abs(b[axis] - a[axis]) > Math.abs(c[axis] - a[axis]);
      const scale = alongX ? (b[axis] - a[axis]) / (width * 0.5) : (c[axis] - a[axis]) / (height * 0.5);
      const from = alongX ? left + 0.25 * width : top + 0.25 * height;
      return { axis, across: alongX ? 0 : 1, scale, offset: a[axis] - scale * from };
    });
  }

  // Continuous RAS voxel coordinates in the plane: voxel v covers [v, v + 1).
  planePoint(x, y) {
    const frac = this.fraction(x, y);
    return frac && this.grid.plane.map((axis) => frac[axis] * this.grid.ras[axis]);
  }

  // Native index of the voxel at plane coordinates, or -1 outside.
  voxelAt(u, v) {
    const [p, q] = this.grid.plane, at = [0, 0, 0];
    at[p] = Math.floor(u);
    at[q] = Math.floor(v);
    if (at[p] < 0 || at[q] < 0 || at[p] >= this.grid.ras[p] || at[q] >= this.grid.ras[q]) return -1;
    const z = this.slice;
    at[this.grid.depth] = this.grid.reversed[this.grid.depth] ? this.grid.slices - 1 - z : z;
    return this.grid.native(...at);
  }

  // Place on the canvas (CSS pixels) of the centre of native column x, row y, and the size of a voxel there.
  screen(x, y) {
    const line = this.lines();
    if (!line) return null;
    const dpr = this.nv.uiData.dpr || 1, vox = this.grid.rasVoxel(x, y, this.slice), at = [0, 0], size = [1, 1];
    for (const { axis, across, scale, offset } of line) {
      at[across] = ((vox[axis] + 0.5) / this.grid.ras[axis] - offset) / scale / dpr;
      size[across] = Math.abs(1 / (this.grid.ras[axis] * scale * dpr));
    }
    return { x: at[0], y: at[1], size };
  }
}

// A volume from the bytes of a NIfTI file, gzipped or not.
export function read(buffer, name, options = {}) {
  const [first, second] = new Uint8Array(buffer, 0, 2);
  return NVImage.loadFromUrl({ url: buffer, name: `${name}.nii${first === 31 && second === 139 ? ".gz" : ""}`, ...options });
}
