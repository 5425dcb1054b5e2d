// Planes on the screen: their place on the canvas, and the voxel under a point.

const MAIN = 0.62; // fraction of the canvas for the native plane in the three-plane layout
const GAP = 6; // pixels between planes

// Boxes [depth, left, top, width, height] in CSS pixels: the native plane alone, or large beside the other two.
export function layout(depth, three, width, height) {
  if (!three) return [[depth, 0, 0, width, height]];
  const others = [2, 1, 0].filter((d) => d !== depth), wide = width >= height;
  const size = Math.floor((wide ? width : height) * MAIN), rest = (wide ? width : height) - size - GAP;
  const half = Math.floor(((wide ? height : width) - GAP) / 2);
  const other = (i) => (wide ? [size + GAP, i * (half + GAP), rest, half] : [i * (half + GAP), size + GAP, half, rest]);
  return [[depth, 0, 0, ...(wide ? [size, height] : [width, size])], ...others.map((d, i) => [d, ...other(i)])];
}

// One plane as currently drawn. Each of its two RAS axes runs along x or y of the canvas.
export class Plane {
  constructor(viewer, number, tile) {
    const [left, top, width, height] = tile.leftTopWidthHeight, dpr = viewer.nv.uiData.dpr || 1;
    Object.assign(this, { grid: viewer.grid, cross: viewer.cross, dpr, depth: 2 - tile.axCorSag });
    this.box = [left / dpr, top / dpr, width / dpr, height / dpr];
    const at = (fx, fy) => viewer.nv.screenXY2TextureFrac(left + fx * width, top + fy * height, number, false);
    const a = at(0.25, 0.25), b = at(0.75, 0.25), c = at(0.25, 0.75);
    this.axes = this.grid.plane(this.depth).map((axis) => {
      const alongX = Math.abs(b[axis] - a[axis]) > Math.abs(c[axis] - a[axis]);
      const scale = alongX ? (b[axis] - a[axis]) / (width * 0.5) : (c[axis] - a[axis]) / (height * 0.5);
      const from = alongX ? left + 0.25 * width : top + 0.25 * height;
      return { axis, across: alongX ? 0 : 1, scale, offset: a[axis] - scale * from };
    });
  }

  contains(x, y) {
    const [left, top, width, height] = this.box;
    return x >= left && y >= top && x < left + width && y < top + height;
  }

  // Texture coordinates of a point (CSS pixels), also outside the image.
  fraction(x, y) {
    const at = [0.5, 0.5, 0.5];
    at[this.depth] = (this.grid.along(this.depth, this.cross) + 0.5) / this.grid.ras[this.depth];
    for (const { axis, across, scale, offset } of this.axes) at[axis] = (across === 0 ? x : y) * this.dpr * scale + offset;
    return at;
  }

  // Continuous RAS voxel coordinates in the plane: voxel v covers [v, v + 1).
  point(x, y) {
    const fraction = this.fraction(x, y);
    return this.axes.map(({ axis }) => fraction[axis] * this.grid.ras[axis]);
  }

  // Native index of the voxel at coordinates of the plane, or -1 outside.
  index([u, v]) {
    const [p, q] = this.axes.map(({ axis }) => axis), at = [0, 0, 0];
    at[p] = Math.floor(u);
    at[q] = Math.floor(v);
    if (at[p] < 0 || at[q] < 0 || at[p] >= this.grid.ras[p] || at[q] >= this.grid.ras[q]) return -1;
    at[this.depth] = this.grid.along(this.depth, this.cross);
    return this.grid.native(...at);
  }

  // Position (CSS pixels) of the centre of a native voxel.
  screen(voxel) {
    const at = [0, 0];
    for (const { axis, across, scale, offset } of this.axes)
      at[across] = ((this.grid.along(axis, voxel) + 0.5) / this.grid.ras[axis] - offset) / scale / this.dpr;
    return at;
  }

  // CSS pixels per voxel along the two axes, in the order of `axes`.
  get pixels() { return this.axes.map(({ axis, scale }) => Math.abs(1 / (this.grid.ras[axis] * scale * this.dpr))); }

  // Orientation letters at the left, top, right and bottom.
  get letters() {
    const ends = [["L", "R"], ["P", "A"], ["I", "S"]], found = {};
    for (const { axis, across, scale } of this.axes) {
      const [low, high] = scale > 0 ? ends[axis] : [...ends[axis]].reverse();
      if (across === 0) [found.left, found.right] = [low, high];
      else [found.top, found.bottom] = [low, high];
    }
    return found;
  }
}
