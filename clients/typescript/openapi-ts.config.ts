import { defineConfig } from '@hey-api/openapi-ts';

// scripts/typescript_client.py sets both variables.
export default defineConfig({
  input: process.env.TOOLCREW_OPENAPI!,
  output: { path: process.env.TOOLCREW_GENERATED!, module: { extension: '.js' } },
  plugins: ['@hey-api/client-fetch', '@hey-api/typescript', '@hey-api/sdk'],
});
