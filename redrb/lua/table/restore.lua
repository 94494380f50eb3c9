-- Return to a mark, a page at a time: rows that were cleared after it come back, and those that tasks have
-- acknowledged after it can be claimed again. Rows and columns of later puts stay, or are dropped.
-- KEYS[1] stream
-- ARGV    the call `Restore` of redrb/table/calls.py
-- Returns its reply. Repeated, it goes on.
--@include task table records runs claims claim_ends permissions

check_permissions(gone)
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local answer = refusal(ask)
if answer then
  return cmsgpack.pack(answer)
end
local change_of_it, number_of_it = string.match(redis.call('HGET', marks, ask.name) or '', '^(%d+) (%d+)$')
if not change_of_it then
  return cmsgpack.pack({outcome = 'unknown', names = redis.call('HKEYS', marks)}) -- bound: three marks
end
local drops, mark, last = ask.later == 'drop', tonumber(change_of_it), tonumber(number_of_it)

-- Remove from a record the columns that were put after the mark; those that they have replaced are gone.
-- Returns the bytes that are gone, nil if none are.
local function strip(record)
  local bytes
  for at = #record, 2, -1 do -- bound: puts of a row
    if record[at][SEGMENT.change] > mark then
      bytes = (bytes or 0) + bytes_of_segment(record[at])
      redis.call('SADD', trash, value_of(record[at]))
      table.remove(record, at)
    end
  end
  if bytes then
    set_head(record)
  end
  return bytes
end

-- Tasks have acknowledged rows before the mark that come back: the rows do not arrive again.
local function keep_consumption(numbered)
  for name, claim in pairs(claims()) do
    local consumed, known = {}, {}
    for i, spent in ipairs(replies_of('ZMSCORE', key('spent', name), numbered)) do
      if spent and tonumber(spent) < mark then
        consumed[#consumed + 1], consumed[#consumed + 2] = spent, numbered[i]
        known[#known + 1], known[#known + 2] = numbered[i], '0'
        if claim.size > 1 then
          redis.call('HINCRBY', key('parts', name), math.floor((numbered[i] - 1) / claim.size), 1)
        end
      end
    end
    in_parts('ZADD', key('consumed', name), consumed)
    in_parts('HSET', key('claimed', name), known)
  end
end

-- Give rows that were cleared their keys again, unless other rows have these.
local function bring_back(numbered, records)
  local found, back, named, stored, changed, over, old, bytes = keys_of(numbered), {}, {}, {}, {}, {}, {}, 0
  local taken, change = replies_of('HMGET', keys, found), next_changes(#numbered)
  for i, record in ipairs(records) do
    bytes = bytes + bytes_of_row(record)
    if not record or taken[i] or named[found[i]] or drops and tonumber((parts_of_head(record[1]))) > mark then
      over[#over + 1], old[#old + 1] = numbered[i], record
    else
      back[#back + 1], named[found[i]] = numbered[i], true
      if drops and strip(record) then
        redis.call('HSET', rows, numbered[i], cmsgpack.pack(record))
      end
      stored[#stored + 1], stored[#stored + 2] = found[i], numbered[i]
      changed[#changed + 1], changed[#changed + 2] = change + i, numbered[i]
      add(task, 'bytes', bytes_of_row(record))
    end
  end
  keep_consumption(back)
  for _, name in ipairs(redis.call('HKEYS', key('claims'))) do -- bound: PAGE.claims
    in_parts('ZREM', key('spent', name), numbered)
  end
  in_parts('HSET', keys, stored)
  in_parts('ZADD', changes, changed)
  in_parts('ZREM', cleared, numbered)
  add(task, 'retained_bytes', -bytes)
  add(task, 'cleared', -#back - #over)
  add(task, 'dropped', #over)
  delete_rows(over, old)
  return #back, #over
end

-- Drop rows that were put after the mark, and the columns of others that were.
local function drop_later(numbered, records)
  local over, old, removed, stored, changed, lost, bytes = {}, {}, {}, {}, {}, {}, 0
  local change = next_changes(#numbered)
  for i, record in ipairs(records) do
    if numbered[i] > last then
      over[#over + 1], old[#old + 1] = numbered[i], record
    else
      local stripped = record and strip(record)
      if stripped then
        bytes = bytes + stripped
        lost[#lost + 1] = numbered[i]
        stored[#stored + 1], stored[#stored + 2] = numbered[i], cmsgpack.pack(record)
        changed[#changed + 1], changed[#changed + 2] = change + i, numbered[i]
      end
    end
  end
  local row_keys = keys_of(over)
  for i, name in ipairs(row_keys) do
    removed[2 * i - 1], removed[2 * i] = change + i, name
  end
  end_claims(over, false)
  end_unconsumed(lost) -- they arrive again where they are complete
  in_parts('HDEL', keys, row_keys)
  in_parts('ZREM', changes, over)
  in_parts('ZADD', gone, removed)
  trim_gone()
  in_parts('HSET', rows, stored)
  in_parts('ZADD', changes, changed)
  add(task, 'dropped', #over)
  add(task, 'bytes', -bytes - delete_rows(over, old))
  return #over
end

-- The hash task holds how far a call of the client has come, as a reply may be lost: the step, the change
-- after which its next page begins, the newest change when it began, and rows brought back and dropped.
local known = redis.call('HGET', task, 'restored') or ''
local token, step, after, until_change, back, dropped = string.match(known,
  '^(%x+) (%l+) (%d+) (%d+) (%d+) (%d+)$')
if token ~= ask.token then
  step, after, until_change, back, dropped = drops and 'later' or 'back', mark, number(task, 'change'), 0, 0
  local found = redis.call('HGETALL', marks) -- bound: three marks
  for i = 1, #found, 2 do
    if tonumber(string.match(found[i + 1], '^%d+')) > mark then -- from here on it names another history
      redis.call('HDEL', marks, found[i])
    end
  end
end
if step == 'later' then
  local numbered, newest = page_of(after, string.format('%d', until_change))
  if #numbered > 0 then
    after, dropped = newest, dropped + drop_later(numbered, records_of(numbered))
  else
    step = 'back'
  end
elseif step == 'back' then
  local numbered = redis.call('ZRANGEBYSCORE', cleared, string.format('%d', mark), '+inf', 'LIMIT', 0,
    PAGE.table_rows)
  if #numbered > 0 then
    local here, gone_now = bring_back(numbered, records_of(numbered))
    back, dropped = back + here, dropped + gone_now
  else
    step = 'claims'
  end
elseif step == 'claims' then
  step = 'done'
  for name, claim in pairs(claims()) do
    local numbered = redis.call('ZRANGEBYSCORE', key('consumed', name), string.format('%d', mark), '+inf',
      'LIMIT', 0, PAGE.table_rows)
    if #numbered > 0 then
      forget_arrival(name, claim.size, numbered, replies_of('HMGET', key('claimed', name), numbered))
      in_parts('ZREM', key('consumed', name), numbered)
      step = 'claims'
      break
    end
    claim.after, claim.full = 0, false -- table/register lets them arrive again
    redis.call('HSET', key('claims'), name, cmsgpack.pack(claim))
  end
end
redis.call('HSET', task, 'restored',
  string.format('%s %s %.0f %.0f %.0f %.0f', ask.token, step, after, until_change, back, dropped))
wake_table(true)
return cmsgpack.pack({outcome = 'ok', more = step ~= 'done', back = tonumber(back),
  dropped = tonumber(dropped), newest = last})
