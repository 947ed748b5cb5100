// Bundles src/ into static/: script, style and icon with a hash of their content in the name, index.html, and the licences
// of the bundled packages. The same sources and package-lock.json give the same bytes.
import { createHash } from 'node:crypto';
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { build } from 'esbuild';

const root = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(root, 'static');

const bundled = await build({
  absWorkingDir: root,
  entryPoints: { page: 'src/main.tsx', style: 'src/style.css' },
  outdir: target,
  bundle: true,
  minify: true,
  write: false,
  metafile: true,
  format: 'esm',
  target: ['es2022', 'chrome123', 'firefox121', 'safari17.5'],
  jsx: 'automatic',
  jsxImportSource: 'preact',
  legalComments: 'none',
});

function hashed(name, content) {
  const [stem, suffix] = name.split('.');
  return `${stem}-${createHash('sha256').update(content).digest('hex').slice(0, 10)}.${suffix}`;
}

function packages(metafile) {
  const found = Object.keys(metafile.inputs).map((path) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(path)?.[1]);
  return [...new Set(found.filter(Boolean))].sort();
}

function licence(name) {
  const folder = join(root, 'node_modules', name);
  const file = readdirSync(folder).find((entry) => /^licen[sc]e/i.test(entry));
  const { version, license } = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'));
  return `${name} ${version} (${license})\n\n${readFileSync(join(folder, file), 'utf8').trim()}\n`;
}

const files = new Map();
for (const { path, contents } of bundled.outputFiles) {
  const name = path.endsWith('.css') ? 'style.css' : 'page.js';
  files.set(name, { name: hashed(name, contents), contents });
}
for (const [name, contents] of [
  ['icon.svg', readFileSync(join(root, 'src', 'icon.svg'))],
  [
    'licences.txt',
    Buffer.from(
      packages(bundled.metafile)
        .map(licence)
        .join(`\n${'-'.repeat(80)}\n\n`),
    ),
  ],
]) {
  files.set(name, { name: hashed(name, contents), contents });
}
const index = readFileSync(join(root, 'src', 'index.html'), 'utf8').replace(
  /\{([a-z.]+)\}/g,
  (_, name) => `/page/${files.get(name).name}`,
);
files.set('index.html', { name: 'index.html', contents: Buffer.from(index) });

rmSync(target, { recursive: true, force: true });
mkdirSync(target, { recursive: true });
for (const { name, contents } of files.values()) writeFileSync(join(target, name), contents);
