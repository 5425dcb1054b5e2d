// Wrapper of NiiVue: one volume in one or three planes, overlays, voxels under the pointer.

import { Niivue, NVImage } from "./vendor/niivue.js";
import { Grid } from "./grid.js";
import { layout, Plane } from "./planes.js";
import { Layers } from "./layers.js";
import { Intensity } from "./intensity.js";

const LARGEST_ZOOM = 40;

export class Viewer {
  constructor(canvas) {
    this.canvas = canvas;
    this.nv = new Niivue({
      interactive: false, dragAndDropEnabled: false, isOrientationTextVisible: false, crosshairWidth: 0,
      backColor: [0, 0, 0, 1], loadingText: "", logLevel: "error", isRadiologicalConvention: true,
      isColorbar: false, show3Dcrosshair: false, isResizeCanvas: true,
    });
    this.grid = null;
    this.three = false;
    this.cross = [0, 0, 0]; // native column, row and slice where the planes meet
    this.layers = new Layers(this);
    this.intensity = new Intensity(this);
    this.moved = () => {};
  }

  async start() {
    await this.nv.attachToCanvas(this.canvas, false);
    this.nv.drawOpacity = 1;
    this.fillBoxes();
    new ResizeObserver(() => { this.arrange(); }).observe(this.canvas);
  }

  // Let each plane fill its box, so that a zoomed image uses the space beside it.
  fillBoxes() {
    const { nv } = this, tight = nv.screenFieldOfViewExtendedVox.bind(nv);
    nv.calculateWidthHeight = (type, scale, width, height) => [width, height];
    nv.screenFieldOfViewExtendedVox = (type = 0) => {
      const screen = tight(type), box = this.boxes?.find(([depth]) => depth === 2 - type);
      if (!box) return screen;
      const wanted = box[3] / box[4], is = screen.fovMM[0] / screen.fovMM[1], i = is < wanted ? 0 : 1;
      const more = screen.fovMM[i] * (i === 0 ? wanted / is - 1 : is / wanted - 1);
      screen.mnMM[i] -= more / 2;
      screen.mxMM[i] += more / 2;
      screen.fovMM[i] += more;
      return screen;
    };
  }

  async load(buffer, slice) {
    const volume = await read(buffer, "image", { colormap: "gray" });
    this.nv.volumes = [];
    this.nv.drawBitmap = null;
    this.nv.addVolume(volume);
    this.volume = volume;
    this.grid = new Grid(volume.hdr.dims.slice(1, 4).map((n) => Math.max(1, n)), volume.permRAS);
    this.spacing = this.grid.axis.map((a) => Math.abs(volume.hdr.pixDims[a + 1]) || 1); // millimetres along RAS axes
    this.oriented = volume.hdr.sform_code > 0 || volume.hdr.qform_code > 0;
    this.intensity.reset();
    this.layers.reset();
    this.nv.scene.pan2Dxyzmm = [0, 0, 0, 1];
    this.nv.setDrawingEnabled(true);
    const [nx, ny, nz] = this.grid.dims;
    this.cross = [Math.floor(nx / 2), Math.floor(ny / 2), Math.max(0, Math.min(nz - 1, slice ?? Math.floor(nz / 2)))];
    this.arrange();
  }

  // Navigation ----------------------------------------------------------------------------------------------------
  get slice() { return this.cross[2]; }

  // Whether the volume has enough slices for the other two planes.
  get hasDepth() { return Boolean(this.grid) && this.grid.slices > 3; }

  set planes(three) { this.three = three; this.arrange(); }

  arrange() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!this.grid || !width || !height) return;
    const dpr = this.nv.uiData.dpr || 1;
    if (Math.abs(this.canvas.width - width * dpr) >= 1 || Math.abs(this.canvas.height - height * dpr) >= 1) this.nv.resizeListener();
    this.boxes = layout(this.grid.depth, this.three && this.hasDepth, width, height);
    this.nv.customLayout = this.boxes.map(([depth, left, top, w, h]) => ({
      sliceType: 2 - depth, position: [left / width, top / height, Math.min(w / width, 1 - left / width), Math.min(h / height, 1 - top / height)],
    }));
    this.draw();
  }

  draw() {
    if (!this.grid) return;
    this.nv.scene.crosshairPos = [0, 1, 2].map((i) => (this.grid.along(i, this.cross) + 0.5) / this.grid.ras[i]);
    this.nv.drawScene();
    this.moved();
  }

  show(slice) { this.look([this.cross[0], this.cross[1], slice]); }

  look(voxel) {
    this.cross = voxel.map((v, a) => Math.max(0, Math.min(this.grid.dims[a] - 1, v)));
    this.draw();
  }

  // Scroll by `by` slices along RAS axis `depth`.
  scroll(depth, by) {
    const next = [...this.cross];
    next[this.grid.axis[depth]] += by;
    this.look(next);
  }

  set radiological(value) { this.nv.opts.isRadiologicalConvention = value; this.draw(); }

  get zoomed() { return this.nv.scene.pan2Dxyzmm[3]; }

  fit() { this.pan2D([0, 0, 0, 1]); }

  pan2D(pan) { this.nv.scene.pan2Dxyzmm = pan; this.draw(); }

  // Zoom by a factor around a point.
  zoom(factor, x, y) {
    const plane = this.at(x, y), pan = [...this.nv.scene.pan2Dxyzmm];
    if (!plane) return;
    const before = plane.fraction(x, y);
    pan[3] = Math.max(1, Math.min(LARGEST_ZOOM, pan[3] * factor));
    if (pan[3] === 1) { this.fit(); return; }
    this.pan2D(pan);
    const after = this.at(x, y)?.fraction(x, y);
    if (after) this.shift(before, after);
  }

  pan(dx, dy, x, y) {
    const plane = this.at(x, y) ?? this.tiles[0];
    if (plane) this.shift(plane.fraction(x - dx, y - dy), plane.fraction(x, y));
  }

  shift(before, after) { // pan so that the point at `after` moves to `before`
    const a = this.nv.frac2mm(before), b = this.nv.frac2mm(after), pan = [...this.nv.scene.pan2Dxyzmm];
    for (let i = 0; i < 3; i++) pan[i] += (b[i] - a[i]) * pan[3]; // the viewer pans before it zooms
    this.pan2D(pan);
  }

  // Centre a voxel in every plane, with at least the given zoom.
  centre(voxel, zoom = 1) {
    this.look(voxel);
    const factor = Math.max(zoom, this.zoomed), at = this.nv.frac2mm(this.nv.scene.crosshairPos), middle = this.nv.frac2mm([0.5, 0.5, 0.5]);
    this.pan2D([...[0, 1, 2].map((i) => middle[i] - at[i] * factor), factor]);
  }

  // Planes and voxels ----------------------------------------------------------------------------------------------
  get tiles() {
    if (!this.grid) return [];
    const drawn = this.nv.screenSlices ?? []; // a new array on every draw
    if (this.drawn !== drawn) [this.drawn, this.shown] = [drawn, drawn.map((tile, number) => new Plane(this, number, tile))];
    return this.shown;
  }

  at(x, y) { return this.tiles.find((plane) => plane.contains(x, y)); }

  // RAS position of the centre of a native voxel in mm.
  millimetres(voxel) {
    const { affine } = this.volume.hdr;
    return [0, 1, 2].map((row) => affine[row][0] * voxel[0] + affine[row][1] * voxel[1] + affine[row][2] * voxel[2] + affine[row][3]);
  }
}

// A volume from the bytes of a NIfTI file, gzipped or not.
export function read(buffer, name, options = {}) {
  const [first, second] = new Uint8Array(buffer, 0, 2);
  return NVImage.loadFromUrl({ url: buffer, name: `${name}.nii${first === 31 && second === 139 ? ".gz" : ""}`, ...options });
}
