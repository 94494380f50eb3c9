-- Part of every script of published weights: their keys, versions and chunks.
--
-- KEYS[1] is the stream of versions; its ids are <version>-0. All other keys share its prefix and
-- with it its hash tag; chunks are derived here, since a version may have thousands.
-- fence is a hash: owner, the publisher that may publish; token, a number for each of its attempts.

local MOST_CHUNKS = 1048576
local versions = KEYS[1]
local prefix = string.sub(versions, 1, -9)
local fence = prefix .. 'fence'

local function newest()
  local entry = redis.call('XREVRANGE', versions, '+', '-', 'COUNT', 1)[1]
  return entry and tonumber(string.match(entry[1], '^%d+')) or 0
end

local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then
      return entry[2][i + 1]
    end
  end
  return nil
end

-- Was this version committed by the very attempt that holds `token`?
local function committed(token, version)
  local id = version .. '-0'
  local entry = redis.call('XRANGE', versions, id, id)[1]
  return entry and field(entry, 'token') == token and entry
end

-- Run EXISTS or UNLINK on every chunk of a version. Returns for how many it was true.
local function on_chunks(command, token, version, count)
  local found = 0
  count = math.min(count, MOST_CHUNKS)
  for first = 0, count - 1, 1000 do
    local keys = {}
    for index = first, math.min(first + 999, count - 1) do
      keys[#keys + 1] = prefix .. 'chunk:' .. token .. ':' .. version .. ':' .. index
    end
    found = found + redis.call(command, unpack(keys))
  end
  return found
end

-- At the memory limit a script may write only after a write that frees memory. This one frees
-- nothing and opens the way for those that do.
local function begin_writing()
  redis.call('DEL', prefix .. 'none')
end
