-- Return to a mark, a page at a time: rows that were cleared after it come back, and those that tasks have
-- acknowledged after it can be claimed again. Rows and columns of later puts stay, or are dropped.
-- KEYS[1] stream
-- ARGV    the call `Restore` of redrb/table/calls.py
-- Returns its reply. Repeated, it goes on.
--@include table runs claims permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local answer = refusal(ask)
if answer then
  return cmsgpack.pack(answer)
end
local mark, last = string.match(redis.call('HGET', marks, ask.name) or '', '^(%d+) (%d+)$')
if not mark then
  return cmsgpack.pack({outcome = 'unknown', names = redis.call('HKEYS', marks)}) -- bound: three marks
end
local drops = ask.later == 'drop'
mark, last = tonumber(mark), tonumber(last)

-- Give rows that were cleared their keys again, unless newer rows have these.
local function bring_back(numbered, records)
  local found, back, named, changed, over, old, bytes = {}, {}, {}, {}, {}, {}, 0
  for i, packed in ipairs(replies_of('HMGET', tags, numbered)) do
    found[i] = packed and cmsgpack.unpack(packed)[''] or ''
  end
  local taken, change = replies_of('HMGET', keys, found), next_changes(#numbered)
  for i, record in ipairs(records) do
    bytes = bytes + bytes_of_row(record or {0})
    if not record or taken[i] or drops and record[1] > mark then
      over[#over + 1], old[#old + 1] = numbered[i], record
    else
      back[#back + 1] = numbered[i]
      named[#named + 1], named[#named + 2] = found[i], numbered[i]
      changed[#changed + 1], changed[#changed + 2] = change + i, numbered[i]
      add(task, 'bytes', bytes_of_row(record))
    end
  end
  for name in pairs(claims()) do
    local consumed, known = {}, {}
    for i, spent in ipairs(replies_of('ZMSCORE', claim_key('spent', name), back)) do
      if spent and tonumber(spent) < mark then
        consumed[#consumed + 1], consumed[#consumed + 2] = spent, back[i]
        known[#known + 1], known[#known + 2] = back[i], '0' -- it does not arrive again
      end
    end
    in_parts('ZADD', claim_key('consumed', name), consumed)
    in_parts('HSET', claim_key('claimed', name), known)
    in_parts('ZREM', claim_key('spent', name), numbered)
  end
  in_parts('HSET', keys, named)
  in_parts('ZADD', changes, changed)
  in_parts('ZREM', cleared, numbered)
  add(task, 'retained_bytes', -bytes)
  add(task, 'cleared', -#back - #over)
  add(task, 'dropped', #over)
  delete_rows(over, old)
  return #back, #over
end

-- Drop rows that were put after the mark.
local function drop_rows(numbered, records)
  local over, old, row_keys, removed, bytes = {}, {}, {}, {}, 0
  local found = {}
  for i, packed in ipairs(replies_of('HMGET', tags, numbered)) do
    found[i] = packed and cmsgpack.unpack(packed)[''] or ''
  end
  local current, change = replies_of('HMGET', keys, found), next_changes(#numbered)
  for i, record in ipairs(records) do
    if record and tonumber(current[i] or '0') == numbered[i] then
      over[#over + 1], old[#old + 1], row_keys[#row_keys + 1] = numbered[i], record, found[i]
      removed[#removed + 1], removed[#removed + 2] = change + i, found[i]
      bytes = bytes + bytes_of_row(record)
    end
  end
  if #over > 0 then
    end_claims(over, false)
  end
  in_parts('HDEL', keys, row_keys)
  in_parts('ZREM', changes, over)
  in_parts('ZADD', gone, removed)
  trim_gone()
  delete_rows(over, old)
  add(task, 'dropped', #over)
  add(task, 'bytes', -bytes)
  return #over
end

-- Drop the columns of rows that were put after the mark; those that they have replaced are gone.
local function drop_columns(numbered, records)
  local stored, changed, lost, bytes = {}, {}, {}, 0
  local change = next_changes(#numbered)
  for i, record in ipairs(records) do
    local puts_before = record and #record
    for at = record and #record or 1, 2, -1 do -- bound: puts of a row
      if record[at][4] > mark then
        bytes = bytes + bytes_of_row({0, record[at]})
        discard(record[at])
        table.remove(record, at)
      end
    end
    if record and #record < puts_before then
      lost[#lost + 1] = numbered[i]
      stored[#stored + 1], stored[#stored + 2] = numbered[i], cmsgpack.pack(record)
      changed[#changed + 1], changed[#changed + 2] = change + i, numbered[i]
    end
  end
  end_unconsumed(lost) -- they arrive again where they are complete
  in_parts('HSET', rows, stored)
  in_parts('ZADD', changes, changed)
  add(task, 'bytes', -bytes)
end

local reply = {outcome = 'ok', step = ask.step, after = 0, until_change = ask.until_change, back = 0,
  dropped = 0, more = true}
local after = string.format('%d', mark)
if ask.step == 'back' then
  local numbered = redis.call('ZRANGEBYSCORE', cleared, after, '+inf', 'LIMIT', 0, PAGE.table_rows)
  if #numbered > 0 then
    reply.back, reply.dropped = bring_back(numbered, records_of(numbered))
  else
    reply.step, reply.after = drops and 'rows' or 'claims', last
    reply.until_change = number(task, 'number')
  end
elseif ask.step == 'rows' then
  local numbered = {}
  for row = ask.after + 1, math.min(ask.after + PAGE.table_rows, ask.until_change) do -- bound: PAGE.table_rows
    numbered[#numbered + 1] = row
  end
  reply.after = numbered[#numbered] or ask.after
  if #numbered > 0 then
    reply.dropped = drop_rows(numbered, records_of(numbered))
  else
    reply.step, reply.after, reply.until_change = 'columns', mark, number(task, 'change')
  end
elseif ask.step == 'columns' then
  local found = redis.call('ZRANGEBYSCORE', changes, '(' .. string.format('%d', ask.after),
    string.format('%d', ask.until_change), 'WITHSCORES', 'LIMIT', 0, PAGE.table_rows)
  local numbered = {}
  for i = 1, #found, 2 do
    numbered[#numbered + 1] = found[i]
  end
  if #numbered > 0 then
    reply.after = tonumber(found[#found])
    drop_columns(numbered, records_of(numbered))
  else
    reply.step = 'claims'
  end
else
  for name, claim in pairs(claims()) do
    local numbered = redis.call('ZRANGEBYSCORE', claim_key('consumed', name), after, '+inf', 'LIMIT', 0,
      PAGE.table_rows)
    if #numbered > 0 then
      forget_arrival(name, claim.size, numbered, replies_of('HMGET', claim_key('claimed', name), numbered))
      in_parts('ZREM', claim_key('consumed', name), numbered)
      wake_table(false)
      return cmsgpack.pack(reply)
    end
    claim.at, claim.last = 0, number(task, 'number') -- table/register lets them arrive again
    redis.call('HSET', table_prefix .. 'claims', name, cmsgpack.pack(claim))
  end
  reply.more = false
end
wake_table(true)
return cmsgpack.pack(reply)
