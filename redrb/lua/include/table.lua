-- The rows of a table; every script of a table includes this.
--
-- KEYS[1] is <prefix>stream, as for a task, although a table has no stream: its other keys share the prefix.
-- The hash task holds settings and counters, the hash puts the last operation of each writer.
--
-- A row has a number, which it got at its first put, and which no other row ever gets. keys: key -> number.
-- rows: number -> record, {head, segment, ...}. tags: number -> {'' = key, name = value},
-- each value as the client has packed it. columns: name -> id. changes: numbers by their last change.
-- gone: keys that were removed, by change; only the newest, as `gone_until` says. trash: keys of values that
-- are to be deleted. In a table that retains cleared rows, cleared: numbers of these, by change.
-- marks: name -> "<change> <last number>".
--
-- Where the hash task has `left` and no `number`, there is no table, but values may be there: of one that is
-- being deleted or resumed, or was, by a process that died. `left` names who does so. A table that is created
-- there keeps the name as `beside`: the values stay beside its own until it is deleted.
-- Records: include/records.lua.
--@include task records

local keys, rows, tags, changes = key('keys'), key('rows'), key('tags'), key('changes')
local columns, gone, trash, cleared = key('columns'), key('gone'), key('trash'), key('cleared')
local marks = key('marks')
local owner = string.sub(prefix, 1, -3)

local function has_table()
  return redis.call('HEXISTS', task, 'number') == 1
end

-- Take so many numbers of changes. Returns the one before the first of them. They follow the server's time in
-- microseconds, so that they go on counting up where a failover or the loss of all data took the newest ones.
local function next_changes(count)
  local last = number(task, 'change')
  if count > 0 then
    last = math.max(last, server_ms() * 1000)
    redis.call('HSET', task, 'change', string.format('%.0f', last + count))
  end
  return last
end

-- The ids of columns by name.
local function column_ids()
  local found, ids = redis.call('HGETALL', columns), {} -- bound: PAGE.columns
  for i = 1, #found, 2 do
    ids[found[i]] = tonumber(found[i + 1])
  end
  return ids
end

-- What a hash holds of rows by number, false where there is nothing, or no number.
local function of_rows(hash, numbered)
  local fields = {}
  for i, row in ipairs(numbered) do
    fields[i] = row or ''
  end
  return replies_of('HMGET', hash, fields)
end

-- A page of rows, by number, whose last change lies after one and up to another; and that of the last row.
local function page_of(after, up_to)
  local found, numbered = redis.call('ZRANGEBYSCORE', changes, '(' .. string.format('%d', after), up_to,
    'WITHSCORES', 'LIMIT', 0, PAGE.table_rows), {}
  for i = 1, #found, 2 do
    numbered[#numbered + 1] = tonumber(found[i])
  end
  return numbered, tonumber(found[#found] or '0')
end

-- Keys of rows by number, '' where their tags are lost.
local function keys_of(numbered)
  local found = of_rows(tags, numbered)
  for i, packed in ipairs(found) do
    found[i] = packed and cmsgpack.unpack(packed)[''] or ''
  end
  return found
end

-- The columns of rows by number, '' where there is no record.
local function columns_of(numbered)
  local all = of_rows(rows, numbered)
  for i, packed in ipairs(all) do
    local _, had = parts_of_head(packed and divided(packed) or '0 ')
    all[i] = had
  end
  return all
end

-- Records of rows by number, false where there is none.
local function records_of(numbered)
  local all = of_rows(rows, numbered)
  for i, packed in ipairs(all) do
    all[i] = packed and cmsgpack.unpack(packed)
  end
  return all
end

-- The key of the value of a segment.
local function value_of(segment)
  return string.format('%s:%d}:%s:%d', owner, segment[SEGMENT.bucket], segment[SEGMENT.token],
    segment[SEGMENT.place])
end

-- Bytes of a record, if there is one.
local function bytes_of_row(record)
  local bytes = 0
  for i = 2, record and #record or 0 do -- bound: puts of a row
    bytes = bytes + bytes_of_segment(record[i])
  end
  return bytes
end

-- Delete rows for good, by number: their values go into the trash. Returns the bytes of these.
local function delete_rows(numbered, records)
  local values, bytes = {}, 0
  for _, record in ipairs(records) do
    bytes = bytes + bytes_of_row(record)
    for at = 2, record and #record or 0 do -- bound: puts of a row
      values[#values + 1] = value_of(record[at])
    end
  end
  in_parts('SADD', trash, values)
  in_parts('HDEL', rows, numbered)
  in_parts('HDEL', tags, numbered)
  return bytes
end

-- Keep the newest removals only; a look from before the others reads the whole table.
local function trim_gone()
  local over = redis.call('ZCARD', gone) - PAGE.gone_kept
  if over > 0 then
    over = math.min(over, PAGE.arguments)
    local last = redis.call('ZRANGE', gone, over - 1, over - 1, 'WITHSCORES')
    redis.call('ZREMRANGEBYRANK', gone, 0, over - 1)
    redis.call('HSET', task, 'gone_until', last[2])
  end
end

-- Rows and bytes that may be added, -1 without a limit.
local function table_room()
  local known = numbers(task, 'limit', 'max_bytes', 'bytes')
  local left = known[1] > 0 and math.max(known[1] - redis.call('HLEN', keys), 0) or -1
  if known[2] > 0 and known[3] >= known[2] then
    left = 0
  end
  return left, known[2] > 0 and known[2] - known[3] or -1
end

-- Wake those who watch the table, and puts for which there is room.
local function wake_table(made_room)
  if redis.call('EXISTS', key('queue', '#watch'), key('queue', '#room')) == 0 then
    return
  end
  --@include clock waiters
  local now = now_ms()
  wake('#watch', 0, now)
  if made_room then
    local left = table_room()
    wake('#room', left < 0 and math.huge or left, now)
  end
end
