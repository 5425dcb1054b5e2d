// Window and level with presets, and the value of a voxel; also for colour pictures.

const RGB24 = 128;
const CT = [
  ["Soft tissue", 40, 400], ["Lung", -600, 1500], ["Bone", 400, 1800], ["Brain", 40, 80], ["Liver", 30, 150],
];

export class Intensity {
  constructor(viewer) { this.viewer = viewer; }

  reset() {
    const { volume } = this.viewer;
    this.coloured = volume.hdr.datatypeCode === RGB24;
    this.original = this.coloured ? volume.img.slice() : null;
    this.auto = this.coloured ? [0, 255] : [volume.cal_min, volume.cal_max];
    this.full = this.coloured ? [0, 255] : extent(volume);
    [this.low, this.high] = this.auto;
  }

  get level() { return (this.low + this.high) / 2; }
  get width() { return this.high - this.low; }

  // Whether values are Hounsfield units: by the name of the channel, or air and tissue in whole numbers.
  isCT(modality) {
    const [low, high] = this.full;
    return /(^|[^a-z])(cb|ld|hr|ce)?cta?([^a-z]|$)|hounsfield/i.test(modality) || (low <= -900 && low >= -4096 && high > 100 && high <= 32767);
  }

  // Presets [name, level, width] for a modality such as CT; automatic first.
  presets(modality) {
    const found = [["Automatic", ...levelWidth(this.auto)], ["All values", ...levelWidth(this.full)]];
    if (this.coloured) return found.slice(0, 1);
    if (this.isCT(modality)) return [...found, ...CT];
    const [low, high] = this.auto;
    return [...found, ["Dark parts", low + (high - low) / 4, (high - low) / 2], ["Bright parts", low + (3 * (high - low)) / 4, (high - low) / 2]];
  }

  set(level, width) {
    const { nv, volume, flat } = this.viewer;
    if (!volume || !(width > 0) || !Number.isFinite(level) || !Number.isFinite(width)) return;
    this.low = level - width / 2;
    this.high = level + width / 2;
    if (flat) {
      flat.paint();
      nv.drawScene();
      return;
    }
    if (this.coloured) {
      const table = Uint8ClampedArray.from({ length: 256 }, (_, v) => ((v - this.low) / width) * 255);
      for (let i = 0; i < volume.img.length; i++) volume.img[i] = table[this.original[i]];
    } else {
      volume.cal_min = this.low;
      volume.cal_max = this.high;
    }
    nv.updateGLVolume();
  }

  // Value of a native voxel after the scaling in its header; RGB for colour.
  at(index) {
    const { volume } = this.viewer;
    if (this.coloured) return Array.from(this.original.subarray(3 * index, 3 * index + 3));
    return volume.img[index] * volume.hdr.scl_slope + volume.hdr.scl_inter;
  }
}

const levelWidth = ([low, high]) => [(low + high) / 2, high - low || 1];

function extent({ img, hdr }) {
  let low = Infinity, high = -Infinity;
  for (let i = 0; i < img.length; i++) {
    if (img[i] < low) low = img[i];
    if (img[i] > high) high = img[i];
  }
  return [low, high].map((v) => v * hdr.scl_slope + hdr.scl_inter).sort((a, b) => a - b);
}
