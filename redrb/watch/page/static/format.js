// Figures as people read them.

const counts = new Intl.NumberFormat("en");

export const count = (value) => (value === null || value === undefined ? "–" : counts.format(value));

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let value = bytes;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (value < 999.5) return `${unit === "B" ? value : value.toFixed(1)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} TB`;
}

export function age(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${seconds.toFixed(0)} s`;
  if (seconds < 6000) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}

export function rate(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  const text = value === 0 ? "0" : counts.format(Number(value.toFixed(digits)));
  return unit ? `${text} ${unit}` : text;
}

export function decimal(value, digits = 3) {
  return value === null || value === undefined ? "–" : Number(value).toFixed(digits);
}

export const waits = (number) => `${count(number)} ${number === 1 ? "waits" : "wait"}`;

export function plural(number, noun, many = `${noun}s`) {
  return `${count(number)} ${number === 1 ? noun : many}`;
}
