import { readFileSync } from 'node:fs';
// set-up
import { Agent, OpenAIProvider, Runner, tool } from '@openai/agents';
import { z } from 'zod';

const { BASE_URL, API_KEY: apiKey, MODEL, DIALECT } = process.env;
const modelProvider = new OpenAIProvider({ baseURL: `${BASE_URL}/v1`, apiKey, useResponses: DIALECT === 'responses' });
const runner = new Runner({ modelProvider, tracingDisabled: true });
// end

const cancel = process.argv[2] === 'cancel';
const stop = new AbortController();
const read = tool({
  name: 'read_file',
  description: 'Reads a file.',
  parameters: z.object({ path: z.string() }),
  execute: async ({ path }) => readFileSync(path, 'utf8'),
});
const agent = new Agent({ name: 'Reader', instructions: 'Be brief.', model: MODEL, tools: [read] });
let deltas = 0;
try {
  const stream = await runner.run(agent, process.env.PROMPT, { stream: true, signal: stop.signal });
  for await (const text of stream.toTextStream()) {
    process.stdout.write(text);
    if (cancel && ++deltas === 5) stop.abort();
  }
  await stream.completed;
} catch (error) {
  if (!stop.signal.aborted) throw error;
}
