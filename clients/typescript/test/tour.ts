/** Uses a real API (TOOLCREW_URL, TOOLCREW_API_KEY) and prints what it returns as one JSON object. */
import {
  batchResults,
  callTool,
  client,
  closeSession,
  execProgram,
  followRun,
  getBatch,
  getSession,
  openSession,
  readSessionFile,
  startRun,
  submitBatch,
  writeSessionFile,
  type Problem,
} from '../src/index.js';

client.setConfig({ baseUrl: process.env.TOOLCREW_URL!, auth: process.env.TOOLCREW_API_KEY! });
const facts: Record<string, unknown> = {};
const thrown = { throwOnError: true } as const;

const session = (await openSession({ body: { ttl_s: 600 }, ...thrown })).data;
const path = { session_id: session.id };

const call = { name: 'bash_tool', arguments: { command: 'echo $((6 * 7))' } };
facts.output = (await callTool({ path, body: call, ...thrown })).data.output;

const program = (await execProgram({ path, body: { argv: ['sh', '-c', 'cat; exit 3'], stdin: btoa('in') }, ...thrown })).data;
facts.program = [program.returncode, atob(program.stdout)];

const bytes = new Uint8Array([0, 1, 254, 255]);
const file = { ...path, path: 'data/été #1.bin' };
facts.written = (await writeSessionFile({ path: file, body: new Blob([bytes]), ...thrown })).data;
const content = (await readSessionFile({ path: file, ...thrown })).data;
facts.read = [...new Uint8Array(await content.arrayBuffer())];

const missing: { error?: Problem; response?: Response } = await readSessionFile({ path: { ...path, path: 'missing' } });
facts.missing = [missing.response?.status, missing.error?.code];
const invalid = await openSession({ body: { ttl_s: -1 } });
facts.invalid = [invalid.response?.status, invalid.error?.code];
const unknown = await openSession({ body: {}, auth: 'no-such-key' });
facts.unknown = [unknown.response?.status, unknown.error?.code];

const run = (await startRun({ body: { instruction: '[item steps] go' }, ...thrown })).data;
const events: string[] = [];
const { stream } = await followRun({ path: { run_id: run.id }, onSseEvent: ({ event }) => event && events.push(event) });
for await (const _ of stream);
facts.events = [events.includes('SandboxReady'), events.at(-1)];

const lines = ['a', 'b'].map((id) => ({ id, instruction: 'say hello' }));
const batch = (await submitBatch({ body: { lines }, ...thrown })).data;
while ((await getBatch({ path: { batch_id: batch.id }, ...thrown })).data.ended_at == null) {
  await new Promise((resolve) => setTimeout(resolve, 200));
}
const rows = (await batchResults({ path: { batch_id: batch.id }, parseAs: 'text', ...thrown })).data as string;
facts.rows = rows.trim().split('\n').map((row) => JSON.parse(row).custom_id).sort();

await closeSession({ path, ...thrown });
facts.closed = (await getSession({ path })).response?.status;
console.log(JSON.stringify(facts));
