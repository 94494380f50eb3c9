-- The keys, versions and chunks of published weights; every script of weights includes this.
--
-- KEYS[1] is the stream of versions; its ids are <version>-0. All other keys share its prefix and
-- with it its hash tag; keys of chunks are derived here, as a version may have thousands.
-- fence is a hash: owner, "<microseconds> <name>" of the publisher that may publish, and when it took over;
-- token, a number for each attempt; data, a name for the data of this server, new after they were lost.
-- manifests is a hash: version -> manifest. pins is a hash: reader -> "<low> <high> <deadline> <ttl>".
-- dropped is a set: tokens whose keys are being deleted on other nodes.
--
-- Fields of an entry: kind; token of the attempt; base, the version that its delta starts from (of
-- an adapter: the one that it belongs to), 0 for none; anchor, the full version that a new reader
-- starts from, 0 for none; nbytes of the state; stored bytes; delta bytes; names, number of tensors;
-- created_ms; full and pieces, its keys, as "<token> <first> <count>;..." of chunk:<token>:<n> and
-- delta:<token>:<n>.

local versions = KEYS[1]
local prefix = string.sub(versions, 1, -9)
local fence = prefix .. 'fence'
local manifests = prefix .. 'manifests'
local pins = prefix .. 'pins'
local dropped = prefix .. 'dropped'

local function parsed(entry)
  local fields = { version = tonumber(string.match(entry[1], '^%d+')) }
  for i = 1, #entry[2], 2 do
    fields[entry[2][i]] = entry[2][i + 1]
  end
  for _, name in ipairs({ 'base', 'anchor', 'nbytes', 'stored', 'delta' }) do
    fields[name] = tonumber(fields[name]) or 0
  end
  return fields
end

local function at(version)
  local id = string.format('%.0f-0', version)
  local found = redis.call('XRANGE', versions, id, id)[1]
  return found and parsed(found)
end

local function newest()
  local found = redis.call('XREVRANGE', versions, '+', '-', 'COUNT', 1)[1]
  return found and parsed(found)
end

-- The newest version that is not an adapter.
local function newest_state()
  local last = '+'
  while true do -- bound: adapters beyond the newest other version, of kept versions
    local found = redis.call('XREVRANGE', versions, last, '-', 'COUNT', PAGE.versions_looked)
    for _, entry in ipairs(found) do
      local fields = parsed(entry)
      if fields.kind ~= 'lora' then
        return fields
      end
      last = '(' .. entry[1]
    end
    if #found < PAGE.versions_looked then
      return nil
    end
  end
end

-- Run EXISTS, PERSIST or UNLINK on keys. Returns the number of keys that it found.
local function on_keys(command, names)
  local found = 0
  if command == 'PERSIST' then
    for _, name in ipairs(names) do
      found = found + redis.call(command, name)
    end
    return found
  end
  for first = 1, #names, PAGE.arguments do
    found = found + redis.call(command, unpack(names, first, math.min(first + PAGE.arguments - 1, #names)))
  end
  return found
end

-- Append the keys <kind>:<token>:<n> of `ranges`, except those for which `is_spared` is true.
local function add_keys(names, kind, ranges, is_spared)
  for token, first, count in string.gmatch(ranges or '', '(%d+) (%d+) (%d+)') do
    for index = tonumber(first), math.min(tonumber(first) + tonumber(count), PAGE.most_chunks) - 1 do
      if not (is_spared and is_spared(token, index)) then
        names[#names + 1] = prefix .. kind .. ':' .. token .. ':' .. index
      end
    end
  end
  return names
end

local function server_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- When a publisher took over, 0 for none.
local function since(owner)
  return tonumber(string.match(owner or '', '^(%d+) ')) or 0
end

-- Whether a publisher is the owner, or is to be: a server that lost its data has none, or an earlier one.
local function is_owner(owner)
  local stored = redis.call('HGET', fence, 'owner')
  return stored == owner or since(stored) < since(owner)
end

-- Make `name` the owner, later than the owner before.
local function take_over(name)
  local time, stored = redis.call('TIME'), redis.call('HGET', fence, 'owner') or ''
  if string.match(stored, '^%d+ (.*)$') == name then
    return stored
  end
  local owner = string.format('%.0f %s', math.max(time[1] * 1000 * 1000 + time[2], since(stored) + 1), name)
  redis.call('HSET', fence, 'owner', owner)
  return owner
end

-- Begin to write: at the memory limit a script may write only after a command that can free memory, such
-- as this DEL.
local function begin_writing()
  redis.call('DEL', prefix .. 'none')
end
