// Mapping between native voxel order (as stored, x fastest), used for strokes, and right-anterior-superior (RAS) order,
// used by the viewer.

export class Grid {
  // dims: native [nx, ny, nz]. perm: for each RAS axis the native axis it runs along, counted from 1, negative if reversed.
  constructor(dims, perm) {
    this.dims = dims;
    this.axis = perm.map((p) => Math.abs(p) - 1);
    this.reversed = perm.map((p) => p < 0);
    this.ras = this.axis.map((a) => dims[a]);
    const step = [1, dims[0], dims[0] * dims[1]];
    this.step = this.axis.map((a, i) => (this.reversed[i] ? -step[a] : step[a]));
    this.start = this.axis.reduce((sum, a, i) => sum + (this.reversed[i] ? step[a] * (dims[a] - 1) : 0), 0);
    this.rasStep = [1, this.ras[0], this.ras[0] * this.ras[1]];
    this.depth = this.axis.indexOf(2); // the RAS axis along which native slices lie
  }

  get size() { return this.dims[0] * this.dims[1] * this.dims[2]; }
  get slices() { return this.dims[2]; }

  // The two in-plane RAS axes of planes perpendicular to RAS axis `depth` (default: of native slices).
  plane(depth = this.depth) { return [0, 1, 2].filter((i) => i !== depth); }

  // Native column, row and slice of a native index, and back.
  voxel(index) {
    const [nx, ny] = this.dims;
    return [index % nx, Math.floor(index / nx) % ny, Math.floor(index / (nx * ny))];
  }

  index([x, y, z]) { return x + this.dims[0] * (y + this.dims[1] * z); }

  // Position along a RAS axis of a native voxel.
  along(i, voxel) { const v = voxel[this.axis[i]]; return this.reversed[i] ? this.ras[i] - 1 - v : v; }

  native(i, j, k) { return this.start + i * this.step[0] + j * this.step[1] + k * this.step[2]; }

  rasIndex(native) {
    const [nx, ny] = this.dims;
    const at = [native % nx, Math.floor(native / nx) % ny, Math.floor(native / (nx * ny))];
    let index = 0;
    for (let i = 0; i < 3; i++) {
      const value = at[this.axis[i]];
      index += (this.reversed[i] ? this.ras[i] - 1 - value : value) * this.rasStep[i];
    }
    return index;
  }

  // RAS voxel of native column x, row y, slice z.
  rasVoxel(x, y, z) {
    const at = [x, y, z];
    return this.axis.map((a, i) => (this.reversed[i] ? this.ras[i] - 1 - at[a] : at[a]));
  }

  // Call `visit` with each index of a map that is not 0. Strokes are sparse: empty words are skipped.
  eachSet(map, visit) {
    const words = new Uint32Array(map.buffer, 0, map.length >> 2);
    for (let w = 0; w < words.length; w++)
      if (words[w]) for (let i = 4 * w; i < 4 * w + 4; i++) if (map[i]) visit(i);
    for (let i = 4 * words.length; i < map.length; i++) if (map[i]) visit(i);
  }

  // A whole map from native order to RAS order.
  toRas(native, target) {
    const [di, dj, dk] = this.ras;
    let r = 0;
    for (let k = 0; k < dk; k++)
      for (let j = 0; j < dj; j++) {
        let n = this.native(0, j, k);
        for (let i = 0; i < di; i++, r++, n += this.step[0]) target[r] = native[n];
      }
  }
}
