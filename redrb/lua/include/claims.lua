-- Claims on the rows of a table: each task that claims is a task below the table's prefix, whose groups name
-- rows. A group arrives when its rows have all columns that the task needs; leases are those of any task.
--
-- claims: name -> {columns = names, size = rows of a group, or 1, ...}. Rows that changed after `after` may
-- have to arrive yet, unless it is `full`. `front` and `back` are what stands in an encoded group before and
-- after the length of its extras, which hold the keys of its rows. `stream` is the incarnation of the task
-- below, whose groups the notes are about. claimed:<name>: number -> seq of the row's group, '' while other
-- rows of it are missing. parts:<name>: number of a group -> how many of its rows are complete.
-- consumed:<name>: numbers of rows that the task has acknowledged, by change. The rows of group g are those
-- with the numbers g * size + 1 to (g + 1) * size.
--@include task table records facts pools elsewhere arrival

local function claims()
  local found, all = redis.call('HGETALL', key('claims')), {} -- bound: PAGE.claims
  for i = 1, #found, 2 do
    all[found[i]] = cmsgpack.unpack(found[i + 1])
  end
  return all
end

-- A group as it is encoded: one sample without tensors, whose extras hold the keys of rows. Tasks that claim
-- rows one by one have the same groups.
local lone = {}
local function encoded(claim, row_keys)
  local frame, key_of_it = claim.front .. claim.back, #row_keys == 1 and row_keys[1]
  lone[frame] = lone[frame] or {}
  if lone[frame][key_of_it] then
    return lone[frame][key_of_it]
  end
  local extras = cmsgpack.pack({{rows = row_keys}})
  local size, length = #extras, {}
  for i = 1, 4 do -- bound: four bytes
    length[i], size = size % 256, math.floor(size / 256)
  end
  local group = claim.front .. string.char(unpack(length)) .. claim.back .. extras
  if key_of_it then
    lone[frame][key_of_it] = group
  end
  return group
end

-- The prefix of a task that claims.
local function claiming(name)
  return key('claims', name) .. ':'
end

-- Add encoded groups to a task that claims; `at` holds the numbers of the rows of each. Returns their seqs.
local function add_groups(name, all, at)
  local members, facts, stored, seqs = {}, {}, {}, {}
  at_task(claiming(name), function()
    if not rules().exists then
      return
    end
    for i, group in ipairs(all) do
      local seq = seq_of(redis.call('XADD', stream, '*', 'g', group))
      seqs[i], members[i], facts[i] = seq, member_of(seq), {samples = 1, size = #group, rows = at[i]}
      stored[2 * i - 1], stored[2 * i] = members[i], cmsgpack.pack(facts[i])
    end
    in_parts('HSET', key('facts'), stored)
    for _, group in ipairs(groups()) do
      enter(group, group, members, facts)
    end
    redis.call('HSET', puts, 'last', string.format('%d', seqs[#seqs]))
    add(puts, 'put', #all)
    add(puts, 'samples_put', #all)
    make_known('')
  end)
  return seqs
end

-- Count rows that have arrived for a task in their groups. Returns the groups that are whole now, with the
-- numbers and keys of their rows.
local function complete_groups(name, size, arrived)
  local counted, order, whole, at, all = {}, {}, {}, {}, {}
  for _, number in ipairs(arrived) do
    local group = math.floor((number - 1) / size)
    if not counted[group] then
      order[#order + 1] = group
    end
    counted[group] = (counted[group] or 0) + 1
  end
  for _, group in ipairs(order) do
    if redis.call('HINCRBY', key('parts', name), group, counted[group]) == size then
      local members = {}
      for place = 1, size do -- bound: PAGE.claim_size
        members[place] = group * size + place
        all[#all + 1] = members[place]
      end
      at[#at + 1] = members
    end
  end
  for i, packed in ipairs(replies_of('HMGET', tags, all)) do
    local place = math.floor((i - 1) / size) + 1
    whole[place] = whole[place] or {}
    table.insert(whole[place], packed and cmsgpack.unpack(packed)[''] or '')
  end
  return at, whole
end

-- Rows have all columns that a task needs: those that are not known to, arrive.
local function arrive(name, claim, numbered, row_keys)
  local known, noted, arrived, all = replies_of('HMGET', key('claimed', name), numbered), {}, {}, {}
  local at, found = {}, {}
  for i, number in ipairs(numbered) do
    if not known[i] then
      arrived[#arrived + 1], noted[#noted + 1], noted[#noted + 2] = number, number, ''
      at[#at + 1], found[#found + 1] = {number}, {row_keys[i]}
    end
  end
  if claim.size > 1 then
    at, found = complete_groups(name, claim.size, arrived)
  end
  for i, row_keys_of in ipairs(found) do
    all[i] = encoded(claim, row_keys_of)
  end
  for i, seq in ipairs(#all > 0 and add_groups(name, all, at) or {}) do
    for _, number in ipairs(at[i]) do
      noted[#noted + 1], noted[#noted + 2] = number, seq
    end
  end
  in_parts('HSET', key('claimed', name), noted)
end

-- Those of the rows that have all columns that a task needs: their numbers and keys. `all` holds their
-- columns.
local function complete_for(claim, ids, numbered, row_keys, all)
  local found, found_keys, whole = {}, {}, {} -- whole: of columns, whether they are all
  for i, had in ipairs(all) do
    if whole[had] == nil then
      whole[had] = true
      for _, column in ipairs(claim.columns) do
        whole[had] = whole[had] and ids[column] and has_column(had, ids[column]) or false
      end
    end
    if whole[had] and row_keys[i] then
      found[#found + 1], found_keys[#found_keys + 1] = numbered[i], row_keys[i]
    end
  end
  return found, found_keys
end

-- Rows have columns that they had not: let them arrive where they are complete.
local function arrive_everywhere(ids, numbered, row_keys, all)
  for name, claim in pairs(claims()) do
    local found, found_keys = complete_for(claim, ids, numbered, row_keys, all)
    if #found > 0 then
      arrive(name, claim, found, found_keys)
    end
  end
end
