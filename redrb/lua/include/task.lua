-- The keys and ids of a task, and the server's time; every script of a task includes this.
--
-- KEYS[1] is the task's stream. All other keys of the task share its prefix, and so its hash tag. They
-- are derived here, as consumer groups and waiters come and go.
--
-- Ids of entries are <BASE><seq>. BASE lies in the future, so that XADD with `*` counts seq up by one:
-- a script in the same transaction knows the ids of the entries that were just added.
--
-- The hash task holds settings and counters; the hash puts what every put changes: `last`, the last id;
-- `put`, `samples_put` and `bytes_put`, counters of all puts; `epoch`; and a record of the last put of each
-- producer: "<operation> <last id> <groups> <epoch>" (include/producers.lua).
--
-- The field `incarnation` of the task is a random text that it is given when it is created. A task that is
-- created anew, after Redis lost its data or after it was cleared, has another one, and its ids begin anew.
-- `kind` has the fields and dtypes of the completed groups that were put first.

local BASE = '9999999999999-'
local stream = KEYS[1]
local prefix = string.sub(stream, 1, -7)
local task = prefix .. 'task'
local puts = prefix .. 'puts'

local PUT_COUNTERS = {'last', 'put', 'samples_put', 'bytes_put'}

local function key(kind, name)
  return name and (prefix .. kind .. ':' .. name) or (prefix .. kind)
end

local function id_of(seq)
  return type(seq) == 'string' and BASE .. seq or string.format('9999999999999-%d', seq)
end

-- Members of sorted sets order by score, then by text: padded, text order is arrival order.
local function member_of(seq)
  return string.format('%016d', seq)
end

local function seq_of(id)
  return tonumber(string.sub(id, #BASE + 1))
end

-- Loops go as far as numbers of fields say, and counting stands still beyond 2^53.
local function checked(text, hash)
  local found = tonumber(text or '0')
  if not found or found ~= found or math.abs(found) >= 9007199254740992 then
    error({err = 'ERR a number in ' .. hash .. ' is damaged: ' .. string.sub(text, 1, 40)})
  end
  return found
end

local function number(hash, field)
  return checked(redis.call('HGET', hash, field), hash)
end

-- Several numbers with one call, 0 for a missing one; and whether the first one is missing.
local function numbers(hash, ...)
  local found = redis.call('HMGET', hash, ...)
  local missing = not found[1]
  for i = 1, #found do
    found[i] = checked(found[i], hash)
  end
  return found, missing
end

local function add(hash, field, amount)
  if amount ~= 0 then
    redis.call('HINCRBY', hash, field, string.format('%.0f', amount))
  end
end

-- Call a command with many arguments, a thousand at a time. Returns the sum of the replies.
local function in_parts(command, name, arguments)
  local total = 0
  for first = 1, #arguments, PAGE.arguments do
    local last = math.min(first + PAGE.arguments - 1, #arguments)
    total = total + redis.call(command, name, unpack(arguments, first, last))
  end
  return total
end

-- The replies of a command that has one for each argument, a thousand at a time.
local function replies_of(command, name, arguments)
  local replies = {}
  for first = 1, #arguments, PAGE.arguments do
    local last = math.min(first + PAGE.arguments - 1, #arguments)
    for i, reply in ipairs(redis.call(command, name, unpack(arguments, first, last))) do
      replies[first + i - 1] = reply
    end
  end
  return replies
end

local function server_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Names of the consumer groups. If their set was lost, they are those that the stream has.
local function groups()
  local all = redis.call('SMEMBERS', key('groups')) -- bound: consumer groups
  if all[1] then
    return all
  end
  local found = redis.pcall('XINFO', 'GROUPS', stream) -- an error, which lists none, without a stream
  for i, info in ipairs(found) do -- bound: consumer groups
    all[i] = info[2]
  end
  return all
end

-- Names of the consumer groups that redrb can have given, sorted, and how many others there are.
local function known_groups()
  local known, all = {}, groups()
  for _, name in ipairs(all) do -- bound: consumer groups
    if string.find(name, '^[%w%._/@+-]+$') then
      known[#known + 1] = name
    end
  end
  table.sort(known)
  return known, #all - #known
end

local function exists()
  return redis.call('EXISTS', task) == 1
end

-- Begin to write. At the memory limit a script may write only after a command that can free memory, such
-- as this DEL. In a cluster, while the slot moves to another node, it fails as every command does that
-- names a missing key: before anything was written.
local function begin_writing()
  redis.call('DEL', prefix .. 'none')
end
